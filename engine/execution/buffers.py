"""Device memory for a plan's arrays, allocated once and reused in every step."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.token_sides import SIDES, Sides, TokenSide
from engine.scheduling.plan import Int32

# Copies to a GPU that may be in flight from one buffer: of a running step, of the one behind it, and the one being
# written.
_COPIES = 3


class Buffer:
    """Memory for int32 arrays that change from step to step, at one address as long as they fit.

    On a CPU, a decoding step is short: code that runs once per step is not in the caches and costs ten times what it
    costs in a loop, above all tensor operations. So numpy writes a CPU's memory, and the tensor over it is kept as long
    as its shape stays the same. A GPU's memory is written through pinned memory, so that no copy waits for its
    computations.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self._allocate(size)

    def _allocate(self, size: int) -> None:
        self.data = torch.zeros(size, dtype=self._dtype, device=self._device)
        self._tensor = self.data[:0]
        self._host: NDArray[np.int64] | None = self.data.numpy() if self._device.type == "cpu" else None
        self._pinned = PinnedRing(size, self._dtype, self._device) if self._host is None else None

    def fill(self, values: Int32, length: int | None = None) -> Tensor:
        """The values on the device in their shape, or followed by zeros up to `length`; valid until the next call."""
        shape = values.shape if length is None else (length,)
        count, size = values.size, math.prod(shape)
        if size > len(self.data):
            self._allocate(2 * size)
        if self._tensor.shape != shape:
            self._tensor = self.data[:size].view(shape)
        if self._pinned is not None:
            self._pinned.send(values.reshape(-1), self.data[:size])
        elif self._host is not None:
            self._host[:count] = values.reshape(-1)
            self._host[count:size] = 0
        return self._tensor


class SideBuffers:
    """Memory for the sides of a step's tokens, allocated for each side when a plan first has it. `size`: number of
    tokens of a typical step."""

    def __init__(self, size: int, device: torch.device):
        self._size, self._device = size, device
        self._buffers: dict[str, Buffer] = {}

    def fill(self, sides: Sides, length: int) -> dict[str, Tensor]:
        """The sides on the device, followed by defaults up to `length` tokens; valid until the next call."""
        return {name: self._fill(SIDES[name], values, length) for name, values in sides.items()}

    def _fill(self, side: TokenSide, values: Int32, length: int) -> Tensor:
        buffer = self._buffers.get(side.name)
        if buffer is None:
            buffer = self._buffers[side.name] = Buffer(side.width * self._size, torch.int64, self._device)
        if side.default and len(values) < length:  # a buffer is filled up with zeros
            values = side.part(values, 0, length)
        filled = buffer.fill(values, side.width * length)
        return filled if side.width == 1 else filled.view(-1, side.width)


def laid(side: TokenSide, numbers: Tensor) -> Tensor:
    """A side's numbers [width, tokens] in the layout that operations read."""
    return numbers[0] if side.width == 1 else numbers.T


class PinnedRing:
    """Host memory that a GPU reads while the host continues: a few pieces, each rewritten after it has been read."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        on_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=dtype, pin_memory=on_gpu) for _ in range(_COPIES)]
        self._read = [torch.cuda.Event() for _ in range(_COPIES)] if on_gpu else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, values: NDArray[np.int32] | NDArray[np.int64], target: Tensor) -> None:
        """Copy values to the start of target [at most `size`], and zeros to the rest."""
        turn, self._turn = self._turn, (self._turn + 1) % _COPIES
        if self._read:
            self._read[turn].synchronize()  # finished long ago, unless very much is sent at once
        host = self._hosts[turn][: len(target)]
        numbers = host.numpy()
        numbers[: len(values)] = values
        numbers[len(values) :] = 0
        target.copy_(host, non_blocking=True)
        if self._read:
            self._read[turn].record()
