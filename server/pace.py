"""Averages of durations, and of event rates while events are expected."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Mean:
    """A moving average, 0 before the first value. `memory`: a new value weighs at least one in this many."""

    def __init__(self, memory: int):
        self._memory = memory
        self.value = 0.0
        self.count = 0  # the number of values so far, or the memory if that is less

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self._memory)
        self.value += (value - self.value) / self.count


class Pace:
    """The pace of events, measured by a stopwatch that runs only while it is switched on."""

    def __init__(self, clock: Callable[[], float], memory: int):
        self._clock = clock  # monotonic seconds
        self._memory = memory  # the number of latest events that count
        self._passed = 0.0  # time on the stopwatch when it was last stopped
        self._since: float | None = None  # when it was started, on the clock; None if it is stopped
        self._marks: deque[float] = deque([0.0], maxlen=memory + 1)

    def switch(self, on: bool) -> None:
        """Start or stop the stopwatch."""
        if on and self._since is None:
            self._since = self._clock()
        elif not on and self._since is not None:
            self._passed, self._since = self._watch(), None

    def count(self, events: int = 1) -> None:
        """Record this many events."""
        self._marks.extend([self._watch()] * min(events, self._memory))

    @property
    def seconds(self) -> float:
        """Average seconds between events, including the wait for the next one, so that a late event shows. Before the
        first event, it is the time that has passed."""
        return (self._watch() - self._marks[0]) / len(self._marks)

    def _watch(self) -> float:
        return self._passed + (0.0 if self._since is None else self._clock() - self._since)
