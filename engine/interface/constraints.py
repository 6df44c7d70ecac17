"""The interface of rules that decide, token by token, which tokens may come next in an answer: grammars, lists of
tokens.

A constraint belongs to exactly one sequence: a fork of the sequence gets a fork of it. The masks of a step are filled
after its forward pass has begun, and sampling needs them at its end, so a device computes meanwhile. A sequence with a
constraint is planned only once its last token is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from engine.interface.sampling_table import MaskRow, Masks, mask_words


class Constraint(Protocol):
    """The state of one answer. Tokens that end answers, and forced tokens, are never passed to `accept`."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    @property
    def is_complete(self) -> bool:
        """Whether only the end of the answer may follow; `fill` is not called then."""

    def accept(self, token: int) -> None:
        """Continue the answer with this token, which `fill` has allowed."""

    def fill(self, mask_row: MaskRow) -> None:
        """Write which tokens may come next, one bit each (`engine.interface.sampling_table.mask_words`), into uint32
        words that are 0. If the answer may end, tokens that end it are among them. This does not change the state,
        because a step that is planned again calls it twice."""

    def fork(self) -> Constraint:
        """A copy of the state that develops independently."""


@runtime_checkable
class FillsTogether(Protocol):
    """A constraint that is filled faster together with others of its kind."""

    @staticmethod
    def fill_together(constraints: Sequence[Constraint], places: Sequence[int], masks: Masks) -> None:
        """`fill` for several constraints of this class, each into its row of `masks`."""


@runtime_checkable
class Forcing(Protocol):
    """A constraint that often allows a single token, several times in a row."""

    def forced(self) -> Sequence[int]:
        """Tokens that `fill` forces: each is the only one allowed after those before it. Empty if this is unknown.
        It does not change the state."""


@runtime_checkable
class Weighing(Protocol):
    """A constraint that also depends on the probabilities of tokens."""

    # if the allowed tokens from this one on are together likelier than each single allowed token below it, only they
    # may come
    outweighed_from: int


@runtime_checkable
class Lifting(Protocol):
    """A constraint that often allows every token. `is_free`: whether it does now, so that `fill` need not be called."""

    is_free: bool

    def pass_by(self, token: int) -> None:
        """Take a token that would end other answers, but after which this one continues."""


@runtime_checkable
class Failing(Protocol):
    """A constraint that may turn out to be too expensive. `problem`: the reason why it cannot continue, None while it
    can; it then allows no token."""

    problem: str | None


class AllowedTokens:
    """A fixed set of tokens. An answer ends with one of them, by its length or by a stop string. `ids`: ids within the
    vocabulary, in any order."""

    is_complete = False

    def __init__(self, ids: Iterable[int], vocab_size: int):
        self.ids, self.vocab_size = tuple(sorted(set(ids))), vocab_size

    @cached_property
    def _row(self) -> MaskRow:
        row = np.zeros(mask_words(self.vocab_size), dtype=np.uint32)
        allow(row, self.ids)
        return row

    def accept(self, token: int) -> None:
        """Do nothing: the allowed tokens are always the same."""

    def fill(self, mask_row: MaskRow) -> None:
        """Write which tokens may come next."""
        mask_row[:] = self._row

    def fork(self) -> AllowedTokens:
        """Itself, because it has no state."""
        return self


def fill_masks(constraints: Sequence[Constraint], places: Sequence[int], masks: Masks) -> None:
    """Let each constraint fill its row of `masks`."""
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
