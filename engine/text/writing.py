"""Formats in which models write calls of functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The format of an argument: begin NAME middle VALUE end.

    Attributes:
        middle_of_json: stands there instead of `middle` where the value is JSON and no text, if that is told apart.
    """

    begin: str
    middle: str
    end: str
    middle_of_json: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """The format of a family's calls: first, then begin NAME middle ARGUMENTS end for each, then last.

    Attributes:
        between: stands between two calls; None if there can be only one.
        pair: how each argument stands there by itself, text as it is and all else as JSON; None if they are one
            object.
        quote: the mark around strings where the object is JSON but for these and its keys, which have no quotes; None
            for JSON.
    """

    first: str
    begin: str
    middle: str
    end: str
    between: str | None
    last: str
    pair: Pair | None = None
    quote: str | None = None

    @property
    def as_json(self) -> bool:
        """The arguments are one object in JSON."""
        return self.pair is None and self.quote is None

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as text: names, and arguments in JSON."""
        each = [f"{self.begin}{name}{self.middle}{arguments}{self.end}" for name, arguments in calls]
        return f"{self.first}{(self.between or '').join(each)}{self.last}"


HERMES = Writing(
    first="",
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
    between="\n",
    last="",
)
