"""Formats in which models write function calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The format of an argument: begin NAME middle VALUE end. `middle_of_json`: used instead of `middle` if the value
    is JSON rather than text, in formats that distinguish them."""

    begin: str
    middle: str
    end: str
    middle_of_json: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """The format of a family's calls: first, then begin NAME middle ARGUMENTS end for each call, then last."""

    first: str
    begin: str
    middle: str
    end: str
    between: str | None  # separates two calls; None if only one call is possible
    last: str
    # the format of each argument, with text unchanged and all else as JSON; None if the arguments are one object
    pair: Pair | None = None
    # the mark around strings if the object is JSON except for these marks and its unquoted keys; None for JSON
    quote: str | None = None

    @property
    def as_json(self) -> bool:
        """Whether the arguments are one object in JSON."""
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
