"""The live feed: the state of the pages of the KV cache, and the running and waiting requests.

The server queries the engine a few times a second while someone watches the feed, once for all watchers, and otherwise
not at all. A frame contains no content or id of a request.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator
from typing import Any

from pydantic_core import to_json

from engine import CacheMap, EngineDeadError, EngineStats, LiveRequest
from engine.process.client import EngineClient
from server.door.drain import Drain
from server.errors import ApiError

INTERVAL = 0.25  # seconds between queries to the engine
MAX_WATCHERS = 32


class LiveFeed:
    """A feed that queries the engine once for all its clients.

    Args:
        drain: ends the feed when the service stops.
        keepalive: seconds without a change after which an empty frame is sent; 0 for never.
    """

    def __init__(self, client: EngineClient, drain: Drain, keepalive: float):
        self._client = client
        self._drain = drain
        self._keepalive = keepalive or None
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._frame = b""
        self.num_watchers = 0

    def check_room(self) -> None:
        """Refuse a watcher if there are too many. Raises ApiError: 503."""
        if self.num_watchers >= MAX_WATCHERS:
            message = (
                f"{self.num_watchers} clients are watching already; at most {MAX_WATCHERS} are allowed. Close "
                f"one of them."
            )
            raise ApiError(503, message, code="overloaded", headers={"Retry-After": "5"})

    async def frames(self) -> AsyncGenerator[str, None]:
        """The current frame and each changed one, as JSON; a slow client misses some. A frame is empty if nothing has
        changed for too long. It ends when the service stops."""
        self.num_watchers += 1
        if self._task is None or self._task.done():
            self._frame, self._changed = b"", asyncio.Event()
            self._task = asyncio.create_task(self._poll())
        task, shown = self._task, b""
        try:
            while not task.done():
                if shown is self._frame:
                    try:
                        async with asyncio.timeout(self._keepalive):
                            await self._changed.wait()
                    except TimeoutError:
                        yield ""
                elif shown := self._frame:
                    yield shown.decode()
            if not task.cancelled():
                task.result()  # the watcher gets the failure
        finally:
            self.num_watchers -= 1
            if not self.num_watchers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _poll(self) -> None:
        look: asyncio.Task[bytes] | None = None
        try:
            while not self._drain.draining:
                look = look or asyncio.create_task(self._look())
                await asyncio.wait(
                    {look}, timeout=INTERVAL
                )  # a step may take longer, and the service may stop meanwhile
                if look.done():
                    self._show(look.result())
                    look = None
                    await asyncio.sleep(INTERVAL)
        finally:
            if look is not None:
                look.cancel()
            self._changed.set()

    def _show(self, frame: bytes) -> None:
        if frame != self._frame:
            self._frame = frame
            self._changed.set()
            self._changed = asyncio.Event()

    async def _look(self) -> bytes:
        try:
            cache_map = await self._client.cache_map()
            return to_json(make_frame(cache_map, self._client.stats()))
        except EngineDeadError:
            return to_json({"engine": "down"})


def label(request_id: str) -> str:
    """The label of a request in frames: the last 20 bits of its id's CRC-32. The label follows from the id, but not the
    id, which is random, from the label."""
    return f"{zlib.crc32(request_id.encode()) & 0xFFFFF:05x}"


def make_frame(cache_map: CacheMap, stats: EngineStats) -> dict[str, Any]:
    """A frame, described in docs/api.md."""
    kinds = cache_map.kinds
    cells = list(zip(cache_map.runs[::2], cache_map.runs[1::2], strict=True))
    # The time of the map; the statistics may be one step newer.
    held, cached = (sum(count * pages[kind] for count, kind in cells) for pages in (kinds.held, kinds.cached))
    names = [label(request.request_id) for request in cache_map.running]
    return {
        "engine": "up",
        "steps": stats.num_steps,
        "pages": {
            "total": stats.pages_total,
            "free": stats.pages_total - held - cached,
            "held": held,
            "cached": cached,
            "tokens": stats.block_size,
            "per_cell": cache_map.pages_per_cell,
        },
        "cells": cache_map.runs,
        "kinds": {
            "held": kinds.held,
            "cached": kinds.cached,
            "tables": kinds.tables,
            "found": kinds.found,
            "requests": [[names[place] for place in places] for places in kinds.holders],
            "others": kinds.others,
        },
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "running": [_request(request) for request in cache_map.running],
        "waiting": [_request(request) for request in cache_map.waiting],
    }


def _request(request: LiveRequest) -> dict[str, Any]:
    return {
        "request": label(request.request_id),
        "prompt": request.num_prompt,
        "answer": request.num_output,
        "computed": request.num_computed,
        "sequences": request.num_sequences,
        "beams": request.beams,
        "pages": request.num_pages,
        "found": request.num_found,
    }
