"""Server-sent events, and noticing that the client has left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from server.errors import to_api_error

logger = logging.getLogger("octavo.server")

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, cancelling it (and waiting for its end) as soon as the client leaves.

    The request's body must have been read already: what `receive` brings is thrown away.

    Raises:
        ClientGoneError: the client left first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_until_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def sse(data: str) -> str:
    """One event."""
    return f"data: {data}\n\n"


class EventStream(Response):
    """Answers with the events of an asynchronous generator.

    The first event is awaited before the status is sent: an exception up to there is answered as an
    ordinary error; a later one becomes an event with OpenAI's error body, and the end. When the client
    leaves, the generator is cancelled where it stands.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], headers: dict[str, str] | None = None):
        # No proxy on the way may keep or collect what is meant to arrive at once.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_while_connected(receive, self._send_all(send))
        except ClientGoneError:
            logger.debug("The client left before the stream ended.")

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            event: str | None = await anext(events, None)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while event is not None:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
                try:
                    event = await anext(events, None)
                except Exception as problem:
                    error = sse(to_api_error(problem).body())
                    await send({"type": "http.response.body", "body": error.encode(), "more_body": True})
                    break
            await send({"type": "http.response.body", "body": b"", "more_body": False})
