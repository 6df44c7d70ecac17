"""The parts of files that the system has in memory, how to drop them (Linux), and the available memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def can_evict() -> bool:
    """The system can be told to forget a file, and asked whether it did."""
    return sys.platform == "linux"


def evict(files: Sequence[Path]) -> float:
    """Make the system forget files, as far as it does that.

    Pages stay that a process maps, and on a file system in memory all do.

    Returns:
        The share of their bytes that is in memory all the same.
    """
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what has not been written cannot be forgotten
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    sizes = [file.stat().st_size for file in files]
    return sum(map(lambda file, size: resident(file) * size, files, sizes)) / sum(sizes)


def resident(file: Path) -> float:
    """The share of a file that is in memory.

    Raises:
        OSError: the system does not tell.
    """
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        library = ctypes.CDLL(None, use_errno=True)
        failed = library.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), found)
        del start  # a mapping that is pointed to cannot be closed
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {file}")
        return sum(page & 1 for page in found) / pages


def touch(size: int) -> None:
    """Write to so many bytes of new memory, and free them, so that memory which is asked for next is at hand.

    A virtual machine's host may take back what is free for a while. To give it anew takes it longer than a load.
    """
    np.ones(size, dtype=np.uint8)
