"""Stop strings in a text that arrives in pieces.

There is one Knuth-Morris-Pratt automaton per stop string (SIAM J. Comput. 6, 1977). It takes constant amortised time
per character and stop string, gives the same result however the text is divided, and its state is exactly the number of
characters that have to be held back.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class StopStrings:
    """A request's stop strings, prepared once and shared by its choices. `strings`: non-empty strings."""

    __slots__ = ("failures", "first", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.failures = tuple(_failures(string) for string in self.strings)
        self.first = frozenset(string[0] for string in self.strings)


class StopMatcher:
    """Looks for stop strings in one choice's text.

    The match that *completes* first wins; of several that complete at the same character, the longest. Text that may be
    the beginning of a stop string is held back until it is known not to be one.
    """

    __slots__ = ("_held", "_states", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._states = [0] * len(stops.strings)
        self._held = ""

    def feed(self, text: str, *, accept: bool, include: bool) -> tuple[str, str | None]:
        """Take the next piece of text.

        Args:
            accept: whether this piece may complete a stop string; one that is completed while this is false counts as
                ordinary text.
            include: whether to keep the stop string at the end of the released text.

        Returns:
            The text that may be shown, and the stop string found, or None. After a match, the matcher is
            spent: the rest of the piece is dropped.
        """
        if not self._held and self._stops.first.isdisjoint(text):
            return text, None
        states = self._states
        for at, char in enumerate(text):
            found = ""
            for which, (string, failure) in enumerate(zip(self._stops.strings, self._stops.failures, strict=True)):
                state = states[which]
                while state and string[state] != char:
                    state = failure[state - 1]
                if string[state] == char:
                    state += 1
                if state == len(string):
                    if accept and len(string) > len(found):
                        found = string
                    state = failure[state - 1]
                states[which] = state
            if found:
                seen = self._held + text[: at + 1]
                self._held = ""
                return (seen if include else seen[: len(seen) - len(found)]), found
        seen = self._held + text
        shown = len(seen) - max(states)
        self._held = seen[shown:]
        return seen[:shown], None

    def release(self) -> str:
        """The text that is still held back, when no more will come."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._states)
        return held


def _failures(string: str) -> array[int]:
    """The length of each prefix's longest proper prefix that is also a suffix of it."""
    table = array("l", [0]) * len(string)
    length = 0
    for at in range(1, len(string)):
        while length and string[at] != string[length]:
            length = table[length - 1]
        if string[at] == string[length]:
            length += 1
        table[at] = length
    return table
