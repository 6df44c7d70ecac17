"""Copies of whole pages of the cache, in all its tensors at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.native.loading import Kernel

_COPY = Kernel("copy_pages", "ppipi")


class PageCopier:
    """Copies pages of tensors [num_blocks, ...] on a CPU."""

    def __init__(self, tensors: Sequence[Tensor]):
        for tensor in tensors:
            if not tensor.is_cpu or not tensor.is_contiguous() or len(tensor) != len(tensors[0]):
                raise ValueError(
                    f"tensors must be contiguous and have the same number of pages, got {list(tensor.shape)}"
                )
        self._tensors = [tensor.view(torch.uint8) for tensor in tensors]
        count = len(tensors)
        self._addresses = (ctypes.c_void_p * count)(*(tensor.data_ptr() for tensor in tensors))
        self._sizes = (ctypes.c_int64 * count)(*(tensor[:1].nbytes for tensor in tensors))

    def copy(self, copies: NDArray[np.int32]) -> None:
        """Copy pages [C, 2] (source, destination); all sources are read before anything is written. Raises IndexError
        if a page does not exist."""
        if not len(copies) or not self._tensors:
            return
        if copies.min() < 0 or copies.max() >= len(self._tensors[0]):
            raise IndexError(f"pages {copies.min()} to {copies.max()} of {len(self._tensors[0])} cannot be copied")
        if np.isin(copies[:, 1], copies[:, 0]).any():  # rare: a source is also a destination
            source, target = torch.from_numpy(copies).long().unbind(1)
            for tensor in self._tensors:
                tensor[target] = tensor[source]
            return
        pairs = np.ascontiguousarray(copies, dtype=np.int32)
        _COPY.call(
            ctypes.addressof(self._addresses), ctypes.addressof(self._sizes), len(self._tensors),
            pairs.ctypes.data, len(pairs),
        )  # fmt: skip
