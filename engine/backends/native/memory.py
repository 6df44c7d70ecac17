"""Memory for data that is read completely at every step: weights and pages.

It uses pages of 2 MiB if the system has them. A core prefetches only within a page, and small pages need more address
translations than it caches: from pages of 4 KiB, weights are read half as fast (docs/performance.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import threading

import torch
from torch import Tensor

HUGE = 2**21
_CHUNK = 2**26
_ALIGNED = 64


def huge(size: int, small: int = 0) -> Tensor:
    """uint8 [size], zeros that the system provides on first access, in large pages if possible. `small`: this many of
    the first bytes are in small pages, a multiple of 4096; the first large page follows. Raises MemoryError if there is
    not enough memory."""
    if sys.platform == "win32":
        return torch.zeros(size, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"not enough memory for {size} bytes") from error
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -(whole.data_ptr() + small) % HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages
            if small:
                memory.madvise(mmap.MADV_NOHUGEPAGE, start, min(small, size))
            if small < size:
                memory.madvise(mmap.MADV_HUGEPAGE, start + small, size - small)
    return whole[start : start + size]


def forget(tensor: Tensor) -> None:
    """Set a tensor from `zeros` to zero again, and return its memory to the system until the next write."""
    if tensor.nbytes < HUGE or sys.platform != "linux":
        tensor.zero_()
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    whole = tensor.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
    if advise(tensor.data_ptr(), whole, mmap.MADV_DONTNEED):
        tensor.zero_()
    else:
        tensor.view(-1).view(torch.uint8)[whole:].zero_()


def zeros(*shape: int, dtype: torch.dtype, small: int = HUGE) -> Tensor:
    """Zeros on a CPU, in `huge` memory if there are many. The first bytes are in small pages: each layer has two such
    tensors for keys and values, and a few requests use only the beginning. Raises MemoryError, RuntimeError if there is
    not enough memory."""
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE:
        return torch.zeros(*shape, dtype=dtype)
    return huge(size, small).view(dtype).view(*shape)


def staggered(count: int) -> list[int]:
    """`small` for each of several tensors that are filled together from their beginnings: 2 MiB on average.

    The system takes milliseconds to provide a large page. With the same value for all tensors, one step would need a
    new one in each of them and take hundreds of milliseconds longer than usual.
    """
    return [HUGE // 2 + HUGE * index // count // 4096 * 4096 for index in range(count)]


class Arena:
    """Pieces of large memory, which is freed when none of them is used any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._memory: Tensor | None = None
        self._used = 0

    def take(self, size: int) -> Tensor:
        """uint8 [size], aligned to 64 bytes."""
        if size >= _CHUNK:
            return huge(size)
        with self._lock:
            if self._memory is None or self._used + size > len(self._memory):
                self._memory, self._used = huge(_CHUNK), 0
            start = self._used
            self._used += -(-size // _ALIGNED) * _ALIGNED
            return self._memory[start : start + size]
