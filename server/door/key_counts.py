"""Counts of API keys in this process: their running requests, and their requests per minute."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from server.door.rates import RateWindow, RequestRates


@dataclass(frozen=True, slots=True)
class Begun:
    """A key's counts with one more request."""

    running: int
    window: RateWindow | None  # its requests in the current minute, if they are limited
    counted: bool  # whether the request counts as running until `end`


class CountsKeys(Protocol):
    """Counts requests of keys, in this process or another."""

    async def begin(self, tenant: str, concurrency: int | None, per_minute: int | None) -> Begun:
        """Count a request of a key that may have this many concurrent requests, and this many per minute."""

    def end(self, tenant: str) -> None:
        """A counted request has ended."""


class KeyCounts:
    """The counts. `rates`: counts requests per minute."""

    def __init__(self, rates: RequestRates):
        self._rates = rates
        self.running: Counter[str] = Counter()  # by tenant; only tenants with running requests

    async def begin(self, tenant: str, concurrency: int | None, per_minute: int | None) -> Begun:
        """Count a request of a key that may have this many concurrent requests, and this many per minute."""
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
        self.running[tenant] -= count
        if self.running[tenant] <= 0:
            del self.running[tenant]
