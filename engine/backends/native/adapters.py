"""The low-rank additions of adapters to a product, in the form that the library reads (`src/adapters.h`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.native.memory import Arena
from engine.backends.native.structures import structure

_PANEL = 64  # outputs per panel in src/adapters.h
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)  # by their numbers there

_LowRank = structure("LowRank", "pointer down up | int down_format up_format rank first outputs")
_Slot = structure("AdapterSlot", "pointer parts | int count")


@dataclass(frozen=True, slots=True)
class Part:
    """Some ranks of an adapter: down [rank, in], up [panels, rank, _PANEL], for outputs from `first` on."""

    down: Tensor
    up: Tensor
    first: int
    outputs: int

    def structure(self) -> Any:
        formats = (_FORMATS.index(tensor.dtype) for tensor in (self.down, self.up))
        return _LowRank(self.down.data_ptr(), self.up.data_ptr(), *formats, len(self.down), self.first, self.outputs)


class AdapterTable:
    """The additions to one product, by slot.

    For an adapter to several matrices that are one product here, `up` has many zeros. Ranks that affect the same
    outputs are stored together, and the zeros are left out. Values are stored in bfloat16 or float16 if one of
    them represents them exactly, else in float32.

    Args:
        slots: the slots; the first one is for tokens without an adapter.
        inputs, outputs: the product's sizes.
        rank: maximum rank of an adapter.
    """

    def __init__(self, slots: int, inputs: int, outputs: int, rank: int):
        self.inputs, self.outputs, self.rank = inputs, outputs, rank
        self._parts: list[list[Part]] = [[] for _ in range(slots)]
        self._kept: list[object] = [None] * slots
        self._slots = (_Slot * slots)()
        self.address = ctypes.addressof(self._slots)  # the address of the structures that the library reads

    def put(self, slot: int, parts: list[Part]) -> None:
        """Fill a slot between two steps."""
        made = (_LowRank * len(parts))(*(part.structure() for part in parts))
        self._parts[slot], self._kept[slot] = parts, made
        self._slots[slot].parts, self._slots[slot].count = ctypes.addressof(made), len(parts)

    def clear(self, slot: int) -> None:
        self._slots[slot].count = 0
        self._parts[slot], self._kept[slot] = [], None

    def matrices(self, slot: int) -> tuple[Tensor, Tensor] | None:
        """The float32 matrices of a slot, without ranks that change nothing; None if it is empty."""
        parts = self._parts[slot]
        if not parts:
            return None
        up = torch.zeros(self.outputs, sum(len(part.down) for part in parts))
        before = 0
        for part in parts:
            rank = len(part.down)
            block = part.up.float().permute(0, 2, 1).reshape(-1, rank)[: part.outputs]
            up[part.first : part.first + part.outputs, before : before + rank] = block
            before += rank
        return torch.cat([part.down.float() for part in parts]), up


def lay_out(down: Tensor, up: Tensor, arena: Arena) -> list[Part]:
    """The parts of an addition of down [rank, in] and up [out, rank]. `arena`: the adapter's memory; its products are
    put there in the order in which steps read them."""
    blocks = list(_blocks(up))
    downs = [_kept(down[ranks], arena) for ranks, _, _ in blocks]
    ups = [_kept(_panels(up[first:end, ranks]), arena) for ranks, first, end in blocks]
    return [
        Part(down_part, up_part, first, end - first)
        for down_part, up_part, (_, first, end) in zip(downs, ups, blocks, strict=True)
    ]


def find_runs(slots: Tensor) -> Tensor | None:
    """[runs, 3] the first token, the length and the slot of each run of tokens with an adapter; None if there are none.
    `slots`: [T] int64 slot of each token, 0 for none."""
    values = slots.numpy()
    firsts = np.flatnonzero(np.diff(values, prepend=-1))
    runs = np.stack((firsts, np.diff(firsts, append=len(values)), values[firsts]), axis=1)[values[firsts] > 0]
    return torch.from_numpy(runs) if len(runs) else None


def _blocks(up: Tensor) -> Iterator[tuple[slice, int, int]]:
    """Groups of successive ranks that affect the same outputs, with the first and the end of these outputs."""
    reached = (up != 0).T.to(torch.uint8)  # [rank, out]
    firsts = reached.argmax(1).tolist()
    ends = (up.shape[0] - reached.flip(1).argmax(1)).tolist()
    found: list[tuple[int, int, int, int]] = []
    for rank, (first, end, any_) in enumerate(zip(firsts, ends, reached.any(1).tolist(), strict=True)):
        if not any_:
            continue
        if found and found[-1][1] == rank and first < found[-1][3] and end > found[-1][2]:
            begin, _, before, after = found.pop()
            found.append((begin, rank + 1, min(before, first), max(after, end)))
        else:
            found.append((rank, rank + 1, first, end))
    ordered = sorted(found, key=lambda block: block[2])
    if any(one[3] > other[2] for one, other in pairwise(ordered)):
        found = [(0, up.shape[1], ordered[0][2], max(block[3] for block in found))]
    return ((slice(begin, end), first, last) for begin, end, first, last in found)


def _panels(up: Tensor) -> Tensor:
    return F.pad(up, (0, 0, 0, -len(up) % _PANEL)).view(-1, _PANEL, up.shape[1]).permute(0, 2, 1)


def _kept(values: Tensor, arena: Arena) -> Tensor:
    """A copy in the smallest format that represents the values."""
    values = values.float()
    for dtype in (torch.bfloat16, torch.float16):
        small = values.to(dtype)
        if torch.equal(small.float(), values):
            values = small
            break
    return arena.take(values.nbytes).view(values.dtype).view(values.shape).copy_(values)
