"""Small arrays between the host and a device, without waiting: packed into one copy, from and to pinned memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
# The alignment of arrays in a packed copy: whole vectors are loaded from there.
_ALIGNED = 16
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.bool_): torch.bool,
}


class Uploads:
    """A device's copies of host arrays, by name: arrays that it already has are not sent again.

    Do not change arrays after passing them.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._known: dict[str, tuple[int, Array, Tensor]] = {}
        self.sent = 0

    def put(self, arrays: Mapping[str, Array], versions: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Copy arrays to the device, in their shapes. All new arrays are sent in one asynchronous copy.

        `sent` counts its bytes. `versions`: numbers above 0; an array with the same number as in the last call is the
        same. Others are compared by value.
        """
        known, versions = self._known, versions or {}
        new = []
        for name, values in arrays.items():
            version = versions.get(name, 0)
            last = known.get(name)
            if last is not None and version and last[0] == version:
                continue
            if last is not None and last[1].dtype == values.dtype and np.array_equal(last[1], values):
                known[name] = version, *last[1:]
            else:
                new.append(name)
        if new:
            places, size = [], 0
            for name in new:
                places.append(size)
                size += -(-arrays[name].nbytes // _ALIGNED) * _ALIGNED
            # Pinned memory is not reused before a copy from it is complete, because torch's allocator knows of the
            # copy.
            packed = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            host = packed.numpy()
            for name, place in zip(new, places, strict=True):
                values = arrays[name]
                host[place : place + values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            on_device = packed.to(self._device, non_blocking=True)
            for name, place in zip(new, places, strict=True):
                values = arrays[name]
                bytes_ = on_device[place : place + values.nbytes]
                known[name] = versions.get(name, 0), values, bytes_.view(_TORCH[values.dtype]).view(values.shape)
            self.sent += size
        return {name: known[name][2] for name in arrays}


class Download:
    """A copy of a tensor to the host that has been started; later work on the same stream may write the tensor
    again."""

    def __init__(self, values: Tensor):
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._host = values.clone()

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Array:
        """The values; waits for the copy, and for nothing that was started after it."""
        if self._event is not None:
            self._event.synchronize()
        found: Array = self._host.numpy()
        return found
