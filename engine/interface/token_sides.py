"""Token sides: data of each token in a step besides its id and its position, declared once in `SIDES`.

A side is an array of integers, one entry per token. Requests, sequences, plans, messages, buffers and recorded steps
carry sides by name and never interpret the numbers. Only the operation that reads a side knows their meaning.
docs/adding-a-model.md explains how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequestError
from engine.interface.values import brief
from engine.interface.vision import KEY_BYTES

Values = NDArray[np.int32]
"""[tokens], or [tokens, width] for a side with several numbers per token."""
Sides = Mapping[str, Values]
"""By name; a missing side has its default for every token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSide:
    """One side."""

    # the side's name in requests, plans and inputs. A side that `Embed` reads has a field of this name in
    # `spec.Tokens`: the number of its values, 0 in a model that does not read it.
    name: str
    # the operation that reads it (`engine.model.operations`); None: no step carries it, page hashes cover it
    reads: Literal["Embed", "PrepareHeads", "AddAdapters"] | None
    # the type of its numbers on the host; on a device they are int64 indices, or int32 in recorded steps
    dtype: type[np.int32] = np.int32
    width: int = 1  # numbers per token
    default: int = 0  # the value of each number if nothing is known about a token
    # whether tokens of an answer get the numbers of the last known token; otherwise they get the default
    goes_on: bool = False
    # whether page hashes include the numbers. The root hash of a sequence covers the meaning of any other side's
    # numbers.
    hashed: bool = True
    asked: bool = True  # whether requests may contain it; otherwise the scheduler makes it
    param: str | None = None  # its field of `TokenInput`; None: requests put it in `TokenInput.sides`
    least: int = 0  # this many values are accepted, and ignored, by models that do not read the side
    # noun, form: words for its entries and for an entry with several numbers, in messages
    noun: str = "integers"
    form: str = "integers"
    # rule, fits: a rule for entries with several numbers, in words and as a check
    rule: str = "in any order"
    fits: Callable[[Sequence[int]], bool] = lambda entry: True

    @property
    def field(self) -> str:
        """The request's field that sets it."""
        return self.param or self.name

    @property
    def entry(self) -> int | list[int]:
        return self.default if self.width == 1 else [self.default] * self.width

    def array(self, values: Sequence[Any]) -> Values:
        return np.array(values, dtype=self.dtype).reshape((-1,) if self.width == 1 else (-1, self.width))

    def part(self, known: Values, start: int, count: int) -> Values:
        """The entries of `count` tokens from `start` on, in a sequence of which the first tokens may be known."""
        found = known[start : start + count]
        if len(found) == count:
            return found
        rest = known[-1] if self.goes_on and len(known) else self.default
        return np.concatenate((found, np.full((count - len(found), *known.shape[1:]), rest, dtype=self.dtype)))

    def is_same(self, known: Values) -> bool:
        """Whether all tokens of the sequence have the same numbers."""
        return self.goes_on and len(known) == 1

    def is_known(self, known: Values, start: int) -> bool:
        """Whether tokens from `start` on may have other numbers than the default."""
        return self.goes_on or start < len(known)

    def read(self, values: Any, count: int, limit: int) -> Values | None:
        """The entries for this many tokens from a request; None if all are the default. `limit`: number of values in
        the model, 0 if it does not read the side. Raises InvalidRequestError if the number of entries differs, or a
        value is outside the model's range."""
        name, limit = self.field, max(limit, self.least)
        if not limit:
            self._refuse(f"this model does not read {self.noun}. Remove {name}.", "unsupported_parameter")
        if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
            self._refuse(f"{name} must be a list of {self.noun}, got {brief(values)}.")
        if len(values) != count:
            entries = "entries" if self.width == 1 else self.noun
            self._refuse(f"{name} has {len(values)} {entries} for {count} tokens.")
        for entry in values:
            self._check(entry, limit)
        found = self.array(values)
        return found if (found != self.default).any() else None

    def _check(self, entry: Any, limit: int) -> None:
        name = self.field
        if self.width == 1:
            if not _is_integer(entry):
                self._refuse(f"{name} must hold integers.")
            if not 0 <= entry < limit:
                self._refuse(f"{name} holds {brief(entry)}, but the model has ids 0 to {limit - 1}.", "invalid_value")
            return
        listed = isinstance(entry, Sequence) and not isinstance(entry, (str, bytes))
        right = listed and len(entry) == self.width and all(map(_is_integer, entry))
        if not (right and all(0 <= number < limit for number in entry) and self.fits(entry)):
            self._refuse(
                f"{name} must hold {self.form}, from 0 to {limit - 1}, {self.rule}; got {brief(entry)}.",
                "invalid_value",
            )

    def _refuse(self, message: str, code: str | None = None) -> None:
        raise InvalidRequestError(message, param=self.field, code=code)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_box(edges: Sequence[int]) -> bool:
    left, upper, right, lower = edges
    return left <= right and upper <= lower


SIDES: dict[str, TokenSide] = {
    side.name: side
    for side in (
        # The segment of each token, for encoders with segments.
        TokenSide(name="token_types", reads="Embed", param="token_type_ids", least=1),
        # The box of each token on its page.
        TokenSide(
            name="boxes",
            reads="Embed",
            width=4,
            param="bbox",
            noun="boxes",
            form="boxes of four integers, [left, upper, right, lower]",
            rule="left at most right and upper at most lower",
            fits=_is_box,
        ),
        # The offset from a token's position to its row in rotary tables.
        TokenSide(name="rotary_offsets", reads="PrepareHeads", asked=False, goes_on=True),
        # The slot of each token's adapter, 0 for none. Another adapter may have the slot later, so the root hash of a
        # sequence covers the adapter itself.
        TokenSide(name="adapter_slots", reads="AddAdapters", asked=False, goes_on=True, hashed=False),
        # The number of the vector of an image that a token has in a step, from 1 on; 0 for none.
        TokenSide(name="image_slots", reads="Embed", asked=False, hashed=False),
        # The key of the image whose vector a token has (`engine.interface.vision`).
        TokenSide(name="image_keys", reads=None, width=KEY_BYTES // 4, asked=False),
        # The offsets of a position's further axes, in a model whose positions have several (`Rotary.pairs`). The keys
        # of images cover them.
        TokenSide(name="rotary_axes", reads="PrepareHeads", width=2, asked=False, hashed=False),
    )
}


def hashed(sides: Sides, start: int, count: int) -> list[Values]:
    """The values that distinguish `count` tokens from `start` on from tokens with the same ids but other sides. Sides
    that are the default, or the same for all tokens of a sequence, add nothing, because the root covers those
    (`hashed_root`)."""
    found: list[Values] = []
    for mark, side in _marks():
        known = sides.get(side.name)
        if known is None or not side.hashed or side.is_same(known) or not side.is_known(known, start):
            continue
        values = side.part(known, start, count)
        if (values != side.default).any():
            found += [mark, values.ravel()]
    return found


def hashed_root(sides: Sides) -> list[Values]:
    """The values that distinguish a sequence from others by the sides that are the same for all its tokens."""
    same = [
        (mark, sides[side.name])
        for mark, side in _marks()
        if side.hashed and side.name in sides and side.is_same(sides[side.name])
    ]
    return [part for mark, known in same for part in (mark, known.ravel())]


def _marks() -> Iterable[tuple[Values, TokenSide]]:
    """Each side, preceded by a marker: a number that is neither a token nor -1, because -1 precedes encoder inputs."""
    return ((np.array([-2 - number], dtype=np.int32), side) for number, side in enumerate(SIDES.values()))


def asked_sides() -> Iterable[TokenSide]:
    """The sides that requests may contain."""
    return (side for side in SIDES.values() if side.asked)


def read_sides(given: Mapping[str, Any], count: int, limits: Mapping[str, int]) -> dict[str, Values]:
    """The sides for this many tokens from a request; sides with only default values are left out. `limits`: for each
    side, the number of values that the model reads. Raises InvalidRequestError: names the first invalid or unknown
    side."""
    known = {side.name: side for side in asked_sides()}
    for name in given:
        if name not in known:
            message = f"a token has no {brief(name)}. The known sides are {', '.join(known)}."
            raise InvalidRequestError(message, param="sides", code="invalid_value")
    read = {name: known[name].read(values, count, limits.get(name, 0)) for name, values in given.items()}
    return {name: values for name, values in read.items() if values is not None}
