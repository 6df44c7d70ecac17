"""Device memory that a plan's arrays go to, made once and reused in every step."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.interface.token_sides import SIDES, Sides, TokenSide
from engine.scheduling.plan import Int32

# Copies to a GPU that may be on their way from one buffer: a step that runs, one behind it, the one being written.
_COPIES = 3


class Buffer:
    """Memory for int32 arrays that change from step to step, at one address as long as they fit.

    A step that decodes is short on a CPU: what runs once in a step is not in its caches and costs ten times what it
    costs in a loop, tensor operations most of all. So a CPU's memory is written by numpy, and the tensor over it is
    kept as long as its shape stays. A GPU's is written through pinned memory: no copy waits for what it computes.
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
        """The values on the device, in their shape, or followed by zeros up to `length`; valid until the next call."""
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
    """Memory for the sides of a step's tokens, made for each side when a plan first has it.

    Args:
        size: tokens of most steps.
    """

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
        if side.default and len(values) < length:  # a buffer fills up with zeros
            values = side.part(values, 0, length)
        filled = buffer.fill(values, side.width * length)
        return filled if side.width == 1 else filled.view(-1, side.width)


def laid(side: TokenSide, numbers: Tensor) -> Tensor:
    """A side's numbers [width, tokens] as operations read them."""
    return numbers[0] if side.width == 1 else numbers.T


class PinnedRing:
    """Host memory that a GPU reads while the host goes on: a few pieces, each written again when it has been read."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device):
        on_gpu = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=dtype, pin_memory=on_gpu) for _ in range(_COPIES)]
        self._read = [torch.cuda.Event() for _ in range(_COPIES)] if on_gpu else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, values: NDArray[np.int32] | NDArray[np.int64], target: Tensor) -> None:
        """Copy values into the beginning of target [at most `size`], and zeros into what is left of it."""
        turn, self._turn = self._turn, (self._turn + 1) % _COPIES
        if self._read:
            self._read[turn].synchronize()  # long over, but where very much is sent at once
        host = self._hosts[turn][: len(target)]
        numbers = host.numpy()
        numbers[: len(values)] = values
        numbers[len(values) :] = 0
        target.copy_(host, non_blocking=True)
        if self._read:
            self._read[turn].record()
