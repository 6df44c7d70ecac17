"""GET /playground/live: the cache, the running batch and the queue, a few times a second, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from server.answering.streaming import COMMENT, EventStream, Wanted, sse
from server.context import HouseDep
from server.door.auth import LIVE_PATH
from server.door.head import HEAD
from server.errors import ApiError
from server.live import LiveFeed

# The interactive API documentation cannot try a stream without an end.
router = APIRouter(include_in_schema=False)


@router.get(LIVE_PATH)
async def watch(request: Request, service: HouseDep) -> Response:
    """Stream the feed until the client leaves or the service stops."""
    if not service.settings.enable_cache_map:
        message = "The live feed is switched off on this server (--no-enable-cache-map)."
        raise ApiError(404, message, code="switched_off")
    if HEAD in request.scope:
        return Response(media_type=EventStream.media_type)
    service.live.check_room()
    return EventStream(_events(service.live), Wanted(service.drain, _ignore))


async def _events(live: LiveFeed) -> AsyncGenerator[str, None]:
    async with aclosing(live.frames()) as frames:
        async for frame in frames:
            yield sse(frame) if frame else COMMENT


def _ignore(reason: str) -> None:
    """Ignore the reason why a watcher left."""
