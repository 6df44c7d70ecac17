"""Ranks: processes (or threads) that compute each step together, each with a part of every layer.

Ranks exchange tensors through shared memory (`src/ranks.h`). All ranks call the same functions here, in the same order,
with tensors of the same shape. Sums are added in the order of ranks, so their bits do not depend on which
rank arrives first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.backends.native.loading import Kernel, available
from engine.backends.native.structures import structure
from engine.errors import EngineDeadError, RankError

_Ranks = structure("Ranks", "int rank count capacity | pointer memory | int order meeting patience")
_MEET = Kernel("meet_ranks", "pp")
_FAIL = Kernel("fail_rank", "p")
_LINE = 128  # bytes, as in ranks.h
_CAPACITY = 1 << 20
_PATIENCE = 300.0
_ORDERS = 32  # bits of a meeting's number that count the meetings of one order


def shared_memory(count: int, capacity: int = _CAPACITY) -> int:
    """A file without a name, with room for the meetings of `count` ranks; returns its descriptor."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("octavo-ranks", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, count * (_LINE + 2 * capacity))
    return file


class Ranks:
    """One rank's access to the shared memory through which ranks exchange tensors.

    Args:
        rank, count: this rank, and the number of ranks.
        file: the descriptor from `shared_memory`, which may be closed afterwards.
        capacity: as given there.
    """

    def __init__(self, rank: int, count: int, file: int, capacity: int = _CAPACITY):
        self.rank, self.count = rank, count
        self._memory = mmap.mmap(file, count * (_LINE + 2 * capacity))
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.capacity = capacity  # bytes that the ranks exchange at once
        self._structure = _Ranks(
            rank=rank,
            count=count,
            capacity=capacity,
            memory=self._bytes.data_ptr(),
            order=1,
            meeting=1 << _ORDERS,
            patience=0,
        )
        self._met = ctypes.c_int64()
        self.address = ctypes.addressof(self._structure)

    @property
    def patience(self) -> float:
        """Seconds that this rank waits for another one; 0 for no limit, as while the model loads."""
        return float(self._structure.patience / 1e9)

    @patience.setter
    def patience(self, seconds: float) -> None:
        self._structure.patience = int(seconds * 1e9)

    def begin(self) -> None:
        """Begin to carry out the next order, as soon as no rank is busy with the one before. Raises EngineDeadError if
        a rank does not come."""
        self.patience = _PATIENCE
        self._structure.order += 1
        self._structure.meeting = (self._structure.order << _ORDERS) - 1
        self._meet()

    def fail(self) -> None:
        """This rank fails to carry out the order: ranks that wait for it raise RankError."""
        if available():  # else no rank waits, and why is told
            _FAIL.call(self.address)

    def check(self, met: int) -> None:
        """Raise the error that the end of a meeting stands for: 0 for none."""
        if met > 0:
            raise RankError(f"rank {met - 1} of {self.count} failed in this step")
        if met < 0:
            raise EngineDeadError(
                f"rank {-1 - met} of {self.count} did not come within {self.patience:g} seconds, for which rank "
                f"{self.rank} waited; start the engine again."
            )

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in x's format."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        flat, mine = out.view(-1), x.reshape(-1)
        for part, own in zip(*(torch.split(each, self._room(x.dtype)) for each in (flat, mine)), strict=True):
            parts = self._exchanged(own, [len(own)] * self.count)
            total = parts[0].float()
            for other in parts[1:]:
                total = total + other.float()
            part.copy_(total)
        return out

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """[N, sum of widths]: the columns [N, width] of all ranks, side by side; only on rank 0, the others get zeros
        of that shape."""
        out = x.new_empty(len(x), sum(widths)) if self.rank == 0 else x.new_zeros(1, 1).expand(len(x), sum(widths))
        step = max(self._room(x.dtype) // max(widths), 1)
        for start in range(0, len(x), step):
            own = x[start : start + step]
            parts = self._exchanged(own.reshape(-1), [len(own) * width for width in widths])
            if self.rank == 0:
                torch.cat([part.view(len(own), -1) for part in parts], dim=1, out=out[start : start + step])
        return out

    def collect(self, x: Tensor) -> Tensor:
        """[count, *x.shape]: all ranks' x."""
        own = x.reshape(-1)
        out = own.new_empty(self.count, len(own))
        room = self._room(x.dtype)
        for start in range(0, len(own), room):
            part = own[start : start + room]
            torch.stack(self._exchanged(part, [len(part)] * self.count), out=out[:, start : start + room])
        return out.view(self.count, *x.shape)

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        own = torch.tensor([number], dtype=torch.int64)
        return int(min(part.item() for part in self._exchanged(own, [1] * self.count)))

    def largest(self, number: int) -> int:
        """The largest of all ranks' numbers."""
        return -self.smallest(-number)

    def _room(self, dtype: torch.dtype) -> int:
        return self.capacity // dtype.itemsize

    def _exchanged(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The elements of all ranks, views that are valid until the next meeting. `sizes`: how many each rank has."""
        number = (self._structure.meeting + 1) & 1
        begins = [self.count * _LINE + (2 * rank + number) * self.capacity for rank in range(self.count)]
        if max(sizes) * own.dtype.itemsize > self.capacity:
            raise ValueError(f"{max(sizes)} elements of {own.dtype} exceed the ranks' buffers of {self.capacity} bytes")
        parts = [
            self._bytes[begin : begin + size * own.dtype.itemsize].view(own.dtype)
            for begin, size in zip(begins, sizes, strict=True)
        ]
        parts[self.rank].copy_(own)
        self._meet()
        return parts

    def _meet(self) -> None:
        _MEET.call(self.address, ctypes.addressof(self._met))
        self.check(self._met.value)
