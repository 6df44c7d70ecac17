"""An event loop for tests of short deadlines, whose clock does not run while others have the machine."""

from __future__ import annotations

import asyncio
import selectors
import time

_TURN = 0.01  # seconds after which the loop looks at its clock again
_MOST = 0.05  # that its clock advances meanwhile


class _ShortSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(_TURN if timeout is None else min(timeout, _TURN))


class PatientEventLoop(asyncio.SelectorEventLoop):
    """However long the process is held up between two turns, for deadlines it is a moment."""

    def __init__(self) -> None:
        self._seen, self._now = time.monotonic(), 0.0
        super().__init__(_ShortSelector())

    def time(self) -> float:
        """Seconds of its own clock."""
        now = time.monotonic()
        self._now += min(now - self._seen, _MOST)
        self._seen = now
        return self._now
