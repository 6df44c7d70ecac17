"""Counts of API keys in this process: their running requests, and their requests per minute."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from server.door.rates import RequestRates, Window


@dataclass(frozen=True, slots=True)
class Begun:
    """A key's counts with one more request.

    Attributes:
        running: its requests that run without this one.
        window: its requests a minute, where they are limited.
        counted: the request runs from now on, until `end`.
    """

    running: int
    window: Window | None
    counted: bool


class CountsKeys(Protocol):
    """Counts requests of keys, wherever that is done."""

    async def begin(self, tenant: str, concurrency: int | None, per_minute: int | None) -> Begun:
        """A request of a key has come, which may have so many at the same time, and so many a minute."""

    def end(self, tenant: str) -> None:
        """A request that was counted has ended."""


class KeyCounts:
    """The counts.

    Args:
        rates: counts requests a minute.
    """

    def __init__(self, rates: RequestRates):
        self._rates = rates
        self.running: Counter[str] = Counter()  # by tenant; those that run none are not in it

    async def begin(self, tenant: str, concurrency: int | None, per_minute: int | None) -> Begun:
        """A request of a key has come, which may have so many at the same time, and so many a minute."""
        running = self.running.get(tenant, 0)
        if concurrency is not None and running >= concurrency:
            return Begun(running, None, counted=False)
        self.running[tenant] += 1
        window = None
        try:
            if per_minute is not None:
                window = await self._rates.take(tenant, per_minute)
        except BaseException:
            self.end(tenant)
            raise
        if window is not None and not window.allowed:
            self.end(tenant)
            return Begun(running, window, counted=False)
        return Begun(running, window, counted=True)

    def end(self, tenant: str, count: int = 1) -> None:
        """A request that was counted has ended, or several."""
        self.running[tenant] -= count
        if self.running[tenant] <= 0:
            del self.running[tenant]
