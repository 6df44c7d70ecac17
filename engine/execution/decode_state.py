"""The inputs of decoding steps, kept on the device from step to step.

A step in which every row computes one token differs little from the previous step: each row's token is the one just
sampled, which the device knows; its position is one further, which the device can count; and sometimes a row gets a new
page. So all of it lies in one array on the device, which each step leaves as the next one expects it. The host keeps a
mirror of that expectation, compares it with the plan, and uploads only the differences: nothing in most steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from engine.execution.buffers import PinnedRing, laid
from engine.interface.token_sides import TokenSide
from engine.scheduling.plan import Int32, Searches, StepPlan

# Maximum number of differences that are uploaded at a time.
_FEW = 4096
# The numbers of a row: its token if the host knows it; else the sampled row that has its token, -1 for none; its
# position; the tokens of its context; how far both advance in a step, 0 for padding; its encoder input's length. The
# numbers of its token's sides follow.
_TOKEN, _SOURCE, _POSITION, _CONTEXT, _ADVANCE, _MEMORY, _SIDES = range(7)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of a step's N rows, including padding: at the same addresses in every step of N rows."""

    tokens: Tensor  # [N] int32 ids, if the host knows them
    sources: Tensor  # [N] int32 the sampled row of the previous step that has the token, otherwise; -1 for none
    # positions, contexts: [N] int32
    positions: Tensor
    contexts: Tensor
    moving: Tensor  # [N] int32, 1 for rows that advance, 0 for padding
    tables: Tensor  # [N, max blocks] int32
    sides: dict[str, Tensor]  # [N] or [N, width] int32, the sides that the model reads
    memory_lens: Tensor  # [N] int32 tokens of encoder inputs
    memories: Tensor  # [N, max encoder blocks] int32 pages of encoder inputs

    def advance(self) -> None:
        """End the step: positions and contexts advance."""
        self.positions.add_(self.moving)
        self.contexts.add_(self.moving)


class _Mirrored:
    """A part of the device's array, as the host expects it there and as the plan wants it."""

    def __init__(self, rows: int, columns: int):
        self.expected = np.zeros((rows, columns), dtype=np.int32)
        self.wanted = self.expected.copy()
        self.first = 0  # where the part begins in the whole array
        self.used = 0  # columns that may hold something other than padding

    def differences(self, rows: slice, columns: int) -> tuple[Int32, Int32]:
        """The positions in the whole array at which `wanted` and `expected` differ, and the wanted values, which are
        copied to `expected`."""
        wanted, expected = self.wanted[rows, :columns], self.expected[rows, :columns]
        row, column = np.divmod(np.flatnonzero(wanted != expected), max(columns, 1))
        values = wanted[row, column]
        expected[row, column] = values
        return ((row + rows.start) * self.wanted.shape[1] + column + self.first).astype(np.int32), values


class DecodeState:
    """The state of up to `max_rows` decoding rows.

    Rows after those of a plan are padding: token 0 at position 0 of block 0, the page that belongs to no sequence.

    Args:
        max_rows: maximum rows of a step, including padding.
        max_blocks, max_memory_blocks: maximum pages of a row's own tokens, and of its encoder input.
        sides: the sides of tokens that the model reads.

    Attributes:
        num_uploaded: how many numbers were sent to the device so far.
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        max_memory_blocks: int,
        device: torch.device,
        sides: Sequence[TokenSide] = (),
    ):
        self.max_rows = max_rows
        ends = [*accumulate((side.width for side in sides), initial=_SIDES)]
        self._sides = [(side, slice(first, end)) for side, (first, end) in zip(sides, pairwise(ends), strict=True)]
        self._fixed, self._tables = _Mirrored(ends[-1], max_rows), _Mirrored(max_rows, max_blocks)
        self._memories = _Mirrored(max_rows, max_memory_blocks)
        parts = (self._fixed, self._tables, self._memories)
        for before, part in pairwise(parts):
            part.first = before.first + before.wanted.size
        self._state = torch.empty(sum(part.wanted.size for part in parts), dtype=torch.int32, device=device)
        self._sender = _Sender(self._state)
        self.reset()

    def reset(self) -> None:
        """Reset the state to padding, whatever the device holds: a failed step may have left it in an unknown state."""
        parts = (self._fixed, self._tables, self._memories)
        for part in parts:
            for numbers in (part.expected, part.wanted):
                numbers.fill(0)
            part.used = 0
        for numbers in (self._fixed.expected, self._fixed.wanted):
            self._pad(numbers)
        self._num_rows = 0  # of the last plan
        self._state.copy_(torch.from_numpy(np.concatenate([part.expected.ravel() for part in parts])))

    @property
    def num_uploaded(self) -> int:
        return self._sender.count

    def inputs(self, rows: int) -> DecodeInputs:
        """The inputs of a step with this many rows, including padding."""
        fixed, tables, memories = (
            self._state[part.first : part.first + part.wanted.size].view(part.wanted.shape)
            for part in (self._fixed, self._tables, self._memories)
        )
        return DecodeInputs(
            tokens=fixed[_TOKEN, :rows],
            sources=fixed[_SOURCE, :rows],
            positions=fixed[_POSITION, :rows],
            contexts=fixed[_CONTEXT, :rows],
            moving=fixed[_ADVANCE, :rows],
            tables=tables[:rows],
            sides={side.name: laid(side, fixed[place, :rows]) for side, place in self._sides},
            memory_lens=fixed[_MEMORY, :rows],
            memories=memories[:rows],
        )

    def load(self, plan: StepPlan) -> None:
        """Bring the device's state to what a plan of R <= max_rows one-token rows needs."""
        count, fixed, known = plan.num_rows, self._fixed.wanted, self._fixed.expected
        if plan.sources is None:
            fixed[_TOKEN, :count], fixed[_SOURCE, :count] = plan.token_ids, -1
        else:  # tokens that the device finds elsewhere are not sent
            fixed[_TOKEN, :count] = np.where(plan.sources < 0, plan.token_ids, known[_TOKEN, :count])
            fixed[_SOURCE, :count] = plan.sources
        fixed[_POSITION, :count], fixed[_CONTEXT, :count] = plan.positions, plan.context_lens
        fixed[_ADVANCE, :count], fixed[_MEMORY, :count] = 1, 0 if plan.cross is None else plan.cross.lens
        for side, place in self._sides:
            fixed[place, :count] = side.default if side.name not in plan.sides else plan.sides[side.name].T
        rows = slice(0, max(count, self._num_rows))
        padding = slice(count, rows.stop)
        self._pad(fixed[:, padding])
        found = [
            self._lay(self._tables, plan.block_tables, rows),
            self._fixed.differences(slice(0, len(fixed)), rows.stop),
        ]
        if plan.cross is not None or self._memories.used:
            found.append(self._lay(self._memories, None if plan.cross is None else plan.cross.tables, rows))
        self._sender.send(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
        self._num_rows = count

    @property
    def tables(self) -> Tensor:
        """The pages [max_rows, max_blocks] int32 of all rows, including padding."""
        size = self._tables.wanted.size
        return self._state[self._tables.first : self._tables.first + size].view(self._tables.wanted.shape)

    def exchanged(self, searches: Searches) -> None:
        """Record that the device reorders the loaded tables of these searches' rows, in an order that the host does not
        know. The next plan uploads its own values at the places where the tables differ or the rows write."""
        rows, widths, columns = (part.tolist() for part in (searches.rows, searches.widths, searches.columns))
        for row, width, column in zip(rows, widths, columns, strict=True):
            expected = self._tables.expected[row : row + width, : self._tables.used]
            differs = (expected != expected[0]).any(axis=0)
            differs[column] = True
            expected[:, differs] = -1

    def advanced(self) -> None:
        """A step that ends with `DecodeInputs.advance` has been started: update the mirror."""
        numbers = self._fixed.expected[:, : self._num_rows]
        numbers[_POSITION] += numbers[_ADVANCE]
        numbers[_CONTEXT] += numbers[_ADVANCE]

    def _pad(self, numbers: Int32) -> None:
        """Fill some columns of the fixed numbers with padding."""
        numbers.fill(0)
        numbers[_SOURCE], numbers[_CONTEXT] = -1, 1
        for side, place in self._sides:
            numbers[place] = side.default

    @staticmethod
    def _lay(part: _Mirrored, tables: Int32 | None, rows: slice) -> tuple[Int32, Int32]:
        count, width = (0, 0) if tables is None else tables.shape
        used = max(part.used, width)
        part.wanted[rows, :used] = 0
        if tables is not None:
            part.wanted[:count, :width] = tables
        part.used = width
        return part.differences(rows, used)


class _Sender:
    """Writes single numbers to an array on the device, without waiting for it. `count`: how many numbers were sent so
    far."""

    def __init__(self, target: Tensor):
        self._target = target
        self._ring = PinnedRing(2 * _FEW, torch.int64, target.device)
        self._landing = torch.zeros(2 * _FEW, dtype=torch.int64, device=target.device)
        self.count = 0

    def send(self, places: Int32, values: Int32) -> None:
        for start in range(0, len(places), _FEW):
            where, what = places[start : start + _FEW], values[start : start + _FEW]
            landed = self._landing[: 2 * len(where)]
            self._ring.send(np.concatenate((where, what)), landed)
            self._target.index_copy_(0, landed[: len(where)], landed[len(where) :].to(torch.int32))
        self.count += len(places)
