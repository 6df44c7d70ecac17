"""Averages of durations, and of the rate of events while there is a reason for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Mean:
    """The recent mean of something, 0 before the first value.

    Args:
        memory: a new value counts as one of so many at least.

    Attributes:
        value: the mean.
        count: of the values so far, or the memory, if that is less.
    """

    def __init__(self, memory: int):
        self._memory = memory
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """One more value."""
        self.count = min(self.count + 1, self._memory)
        self.value += (value - self.value) / self.count


class Pace:
    """The pace of events by a watch of its own, which runs only while it is switched on.

    Args:
        clock: seconds that only grow.
        memory: the latest so many events count.
    """

    def __init__(self, clock: Callable[[], float], memory: int):
        self._clock = clock
        self._memory = memory
        self._passed = 0.0  # until the watch was last stopped
        self._since: float | None = None  # when it was started, by the clock; None: it stands
        self._marks: deque[float] = deque([0.0], maxlen=memory + 1)

    def switch(self, on: bool) -> None:
        """Let the watch run or stand."""
        if on and self._since is None:
            self._since = self._clock()
        elif not on and self._since is not None:
            self._passed, self._since = self._watch(), None

    def count(self, events: int = 1) -> None:
        """Note so many events."""
        self._marks.extend([self._watch()] * min(events, self._memory))

    @property
    def seconds(self) -> float:
        """Seconds from one event to the next, the one that is due included: an event that is long in coming shows.
        Before the first one it is the time that has passed."""
        return (self._watch() - self._marks[0]) / len(self._marks)

    def _watch(self) -> float:
        return self._passed + (0.0 if self._since is None else self._clock() - self._since)
