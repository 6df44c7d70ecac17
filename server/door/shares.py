"""The number of connections of each of several processes on one socket, in shared memory."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_COUNT = struct.Struct("=i")


class Shares:
    """The counts. Each process writes only its own number, so no lock is needed.

    Args:
        path: a file created by `make`.
        place: the index of this process, from 0.
    """

    def __init__(self, path: Path, place: int):
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._place = place

    @staticmethod
    def make(path: Path, num_processes: int) -> None:
        """Create the file; no process has any connection."""
        path.write_bytes(bytes(num_processes * _COUNT.size))

    def show(self, count: int) -> None:
        """Set the number of this process."""
        _COUNT.pack_into(self._memory, self._place * _COUNT.size, count)

    @property
    def elsewhere(self) -> int:
        """Connections of all other processes."""
        return sum(self._others())

    @property
    def ahead(self) -> bool:
        """Whether another process has fewer connections than this one."""
        own: int = _COUNT.unpack_from(self._memory, self._place * _COUNT.size)[0]
        return own > min(self._others(), default=own)

    def _others(self) -> list[int]:
        counts: list[int] = [count for (count,) in _COUNT.iter_unpack(self._memory)]
        del counts[self._place]
        return counts
