"""Checks of single values of a request: numbers and their ranges, lists of token ids, and their display in errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequestError

MAX_INT = 2**31 - 1
MAX_LISTED_IDS = 1024
IDS = f"integers of at least 0 and at most {MAX_INT}"
_SHOWN = 80  # maximum characters of a wrong value that a message repeats


@dataclass(frozen=True, slots=True)
class NumberRange:
    """The allowed values of a number.

    Attributes:
        low, high: the bounds, None for none; the default upper bound of integers is 2**31 - 1.
        open_low: whether `low` itself is excluded.
        integer: whether fractions are excluded.
        optional: whether None is allowed.
    """

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    integer: bool = False
    optional: bool = True

    def __post_init__(self) -> None:
        if self.integer and self.high is None:
            object.__setattr__(self, "high", MAX_INT)


def fail(param: str, message: str) -> None:
    """Refuse a request for the value of this field."""
    raise InvalidRequestError(message, param=param, code="invalid_value")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def brief(value: Any) -> str:
    """A wrong value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python writes
        return f"an integer of {value.bit_length()} bits"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def check_number(name: str, value: Any, allowed: NumberRange) -> None:
    """Refuse a value that is not a finite number or is outside the range."""
    if value is None and allowed.optional:
        return
    kinds = (int,) if allowed.integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        fail(name, f"{name} must be {'an integer' if allowed.integer else 'a number'}, got {brief(value)}.")
    if not allowed.integer and not _is_finite(value):
        fail(name, f"{name} must be finite, got {brief(value)}.")
    low, high = allowed.low, allowed.high
    below = low is not None and (value <= low if allowed.open_low else value < low)
    above = high is not None and value > high
    if below or above:
        lower = "" if low is None else f"{'greater than' if allowed.open_low else 'at least'} {low}"
        upper = "" if high is None else f"at most {high}"
        fail(name, f"{name} must be {' and '.join(x for x in (lower, upper) if x)}, got {brief(value)}.")


def check_ids(name: str, value: Any, *, most: int = MAX_LISTED_IDS) -> None:
    """Check a list of token ids and its length. None is allowed."""
    if value is None:
        return
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        fail(name, f"{name} must be a list of token ids, got {brief(value)}.")
    if len(value) > most:
        fail(name, f"{name} may have at most {most} token ids, got {len(value)}.")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_INT:
            fail(name, f"{name} must hold token ids ({IDS}), got {brief(token)}.")


def check_words(name: str, value: Any) -> None:
    """Check a list of non-empty lists of token ids, and the number of ids. None is allowed."""
    if value is None:
        return
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        fail(name, f"{name} must be a list of lists of token ids, got {brief(value)}.")
    for word in value:
        check_ids(name, [] if word is None else word)
        if not word:
            fail(name, f"{name} must hold lists of at least one token id, got {brief(word)}.")
    if (total := sum(map(len, value))) > MAX_LISTED_IDS:
        fail(name, f"{name} may have at most {MAX_LISTED_IDS} token ids in all, got {total}.")
