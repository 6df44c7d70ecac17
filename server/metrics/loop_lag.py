"""Measures the delay of the event loop, which shows everything that blocks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_PERIOD = 0.25  # seconds between measurements


@asynccontextmanager
async def watch_event_loop(observe: Callable[[float], None], period: float = _PERIOD) -> AsyncIterator[None]:
    """While the block runs, call `observe` every `period` seconds with the seconds by which the loop was late."""
    watch = asyncio.create_task(_watch(observe, period), name="octavo-loop-lag")
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _watch(observe: Callable[[float], None], period: float) -> None:
    now = asyncio.get_running_loop().time
    while True:
        due = now() + period
        await asyncio.sleep(period)
        observe(max(0.0, now() - due))
