"""The interface of rules that decide, token by token, which tokens may come next in an answer: grammars, lists of
tokens.

A sequence owns its constraint, and is the only one that has it: a fork of the sequence gets a fork. The masks of a step
are filled when its forward pass has begun, and sampling needs them when that is over: so a device computes meanwhile. A
sequence that has a constraint is planned only once its last token is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from engine.interface.sampling_table import MaskRow, Masks, mask_words


class Constraint(Protocol):
    """The state of one answer. Tokens that end answers are never given to `accept`, nor are forced ones."""

    @property
    def vocab_size(self) -> int:
        """Tokens that there are."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end of the answer; `fill` is not called then."""

    def accept(self, token: int) -> None:
        """The answer goes on with this token, one of those that `fill` has allowed."""

    def fill(self, mask_row: MaskRow) -> None:
        """Write which tokens may come next, a bit each (`engine.interface.sampling_table.mask_words`), into uint32
        words that are 0; those that end the answer among them, if it may end. Changes no state: a step that is planned
        again asks a second time."""

    def fork(self) -> Constraint:
        """The same state, which goes its own way."""


@runtime_checkable
class FillsTogether(Protocol):
    """A constraint that is filled sooner together with others of its kind."""

    @staticmethod
    def fill_together(constraints: Sequence[Constraint], places: Sequence[int], masks: Masks) -> None:
        """`fill` of several of this class, each into the row of `masks` at its place."""


@runtime_checkable
class Forcing(Protocol):
    """A constraint that often allows a single token, several times in a row."""

    def forced(self) -> Sequence[int]:
        """Tokens that `fill` forces: each is the only one allowed after those before it. Empty if that is unknown.
        Changes no state."""


@runtime_checkable
class Weighing(Protocol):
    """A constraint that also goes by how likely tokens are.

    Attributes:
        outweighed_from: where the allowed tokens from this one on are together likelier than each allowed token below
            it alone, they alone may come.
    """

    outweighed_from: int


@runtime_checkable
class Lifting(Protocol):
    """A constraint that often allows every token.

    Attributes:
        is_free: it does now, so that `fill` need not be called.
    """

    is_free: bool

    def pass_by(self, token: int) -> None:
        """The answer goes on with a token that ends others, and not this one."""


@runtime_checkable
class Failing(Protocol):
    """A constraint that may turn out to be too costly.

    Attributes:
        problem: why it can go on no more, None while it can; then it allows no token at all.
    """

    problem: str | None


class AllowedTokens:
    """Some tokens, always the same: an answer ends with one of them, or where its length or a string ends it.

    Args:
        ids: within the vocabulary, in any order.
    """

    is_complete = False

    def __init__(self, ids: Iterable[int], vocab_size: int):
        self.ids, self.vocab_size = tuple(sorted(set(ids))), vocab_size

    @cached_property
    def _row(self) -> MaskRow:
        row = np.zeros(mask_words(self.vocab_size), dtype=np.uint32)
        allow(row, self.ids)
        return row

    def accept(self, token: int) -> None:
        """Nothing changes."""

    def fill(self, mask_row: MaskRow) -> None:
        """Write which tokens may come next."""
        mask_row[:] = self._row

    def fork(self) -> AllowedTokens:
        """Itself: it has no state."""
        return self


def fill_masks(constraints: Sequence[Constraint], places: Sequence[int], masks: Masks) -> None:
    """Let each constraint fill the row of `masks` at its place."""
    kinds: dict[type[Constraint], list[int]] = {}
    for number, constraint in enumerate(constraints):
        kinds.setdefault(type(constraint), []).append(number)
    for numbers in kinds.values():
        first = constraints[numbers[0]]
        if isinstance(first, FillsTogether):
            first.fill_together([constraints[i] for i in numbers], [places[i] for i in numbers], masks)
        else:
            for i in numbers:
                constraints[i].fill(masks[places[i]])


def allow(mask_row: MaskRow, ids: Iterable[int]) -> None:
    """Set the bits of tokens."""
    tokens = np.array(list(ids), dtype=np.int64)
    np.bitwise_or.at(mask_row, tokens // 32, np.left_shift(np.uint32(1), (tokens % 32).astype(np.uint32)))
