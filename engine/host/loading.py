"""The progress of loading a model."""

from __future__ import annotations

import threading
from collections.abc import Callable

Tell = Callable[[int], None]  # called with the percentage of the loaded weights


class LoadingProgress:
    """Counts loaded bytes and reports each new percentage once; several threads may count. `listener`: called with each
    new percentage; None for no reports."""

    def __init__(self) -> None:
        self.listener: Tell | None = None
        self._lock = threading.Lock()
        self._done = self._total = self._told = 0

    def begin(self, total: int) -> None:
        """Start to count from zero. `total`: bytes to load."""
        with self._lock:
            self._done, self._total, self._told = 0, total, -1

    def add(self, count: int) -> None:
        """Count bytes that have been loaded."""
        with self._lock:
            self._done += count
            percent = min(100, 100 * self._done // max(self._total, 1))
            if self.listener is not None and percent > self._told:
                self._told = percent
                self.listener(percent)


LOADING = LoadingProgress()  # of this process, which loads one model at a time
