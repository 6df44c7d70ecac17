"""An engine that has work and does none of it, such as one whose driver hangs, is started again."""

from __future__ import annotations

import asyncio

from engine.client import EngineClient

# So many looks in a row, a tenth of the limit apart: after the service itself was stopped for a while, the first one
# comes before the engine's news.
_LOOKS = 3


async def restart_when_stuck(client: EngineClient, limit: float) -> None:
    """Watch until cancelled.

    Args:
        limit: seconds without progress after which the engine is given up.
    """
    looks = 0
    while True:
        await asyncio.sleep(limit / 10)
        progress = client.progress
        looks = looks + 1 if not progress.idle and progress.seconds > limit else 0
        if looks == _LOOKS:
            client.give_up(f"the engine had work and made no progress for {progress.seconds:.0f} seconds")
