"""Server-sent events, and work that ends when its answer is no longer wanted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractContextManager, aclosing, nullcontext
from types import TracebackType
from typing import Any, Self, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from server.door.connection import is_stalled
from server.door.drain import Drain, shutting_down
from server.errors import ApiError, to_api_error

logger = logging.getLogger("octavo.server")

T = TypeVar("T")

COMMENT = ": keep-alive\n\n"  # clients ignore it


class ClientGoneError(Exception):
    """The client closed or lost the connection before its answer was complete."""


class Wanted:
    """Whether a request's answer is still wanted."""

    def __init__(self, drain: Drain, interrupted: Callable[[str], None]):
        self._drain = drain  # reports the end of the service's grace period
        # called with the reason if the work was cancelled: disconnect, stall or shutdown. All of the work has ended by
        # then.
        self._interrupted = interrupted

    async def run(self, scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`; cancel it and wait for its end as soon as its result is no longer wanted.

        The request's body must already be read, because messages from `receive` are discarded. Raises ClientGoneError
        if the client left first; ApiError if the service is stopping and cannot wait longer.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.create_task(_until_disconnected(receive))
        reason: str | None = None
        try:
            with self._drain.interruption() as interruption:
                ends: set[asyncio.Future[Any]] = {task, watch, interruption}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if is_stalled(scope):  # the work may be complete all the same; its last data had no reader
                reason = "stall"
                raise ClientGoneError
            if task.done():
                return task.result()
            if watch.done():
                reason = "disconnect"
                raise ClientGoneError
            reason = "shutdown"
            raise shutting_down()
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)
            if reason is not None:
                self._interrupted(reason)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(data: str) -> str:
    return f"data: {data}\n\n"


def failure(problem: ApiError) -> str:
    """OpenAI's error body as an event."""
    return sse(problem.body())


class KeepAlive:
    """Signals when a stream has been silent for too long; a context.

    It uses one timer, which is not reset when something is sent; it checks the time when it fires.
    """

    def __init__(self, seconds: float, wake: Callable[[], None]):
        self._seconds = seconds  # maximum seconds of silence; 0 for no limit
        self._wake = wake  # called after that time
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self.sent()
        if self._seconds:
            self._timer = self._loop.call_later(self._seconds, self._fire)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def sent(self) -> None:
        """Record that something was sent."""
        self._last = self._loop.time()

    @property
    def due(self) -> bool:
        """Whether it is time to send a comment."""
        return bool(self._seconds) and self._loop.time() >= self._last + self._seconds

    def _fire(self) -> None:
        if self.due:
            self._wake()
            self._timer = self._loop.call_later(self._seconds, self._fire)
        else:
            self._timer = self._loop.call_at(self._last + self._seconds, self._fire)


class EventStream(Response):
    """Answers with the items of an asynchronous generator. Each item is a group of events or a comment.

    The first item, which may be empty, is awaited before the status is sent. So an exception before it becomes an
    ordinary error. A later exception becomes an event (by default with OpenAI's error body), and ends the stream. When
    the answer is no longer wanted, the generator is cancelled.

    Args:
        headers: further headers; they may change until the first item.
        held: a context that is left when the answer has ended, even if `events` has not begun.
    """

    media_type: str = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        wanted: Wanted,
        headers: dict[str, str] | None = None,
        held: AbstractContextManager[object] | None = None,
        failing: Callable[[ApiError], str] = failure,
        media_type: str | None = None,
    ):
        # Proxies must not buffer or collect events.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._more = {} if headers is None else headers
        self._events = events
        self._wanted = wanted  # watches whether the answer is still wanted
        self._held = held or nullcontext()
        self._failing = failing  # makes the last events for an error
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._held:
                await self._wanted.run(scope, receive, self._send_all(send))
        except ClientGoneError:
            logger.debug("The client left before the stream ended.")
        except ApiError as problem:
            if not self._begun:
                raise
            await self._send_end(send, self._failing(problem))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            item: str | None = await anext(events, None)
            self.headers.update(self._more)
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            self._begun = True
            while item is not None:
                if item:
                    await send({"type": "http.response.body", "body": item.encode(), "more_body": True})
                try:
                    item = await anext(events, None)
                except Exception as problem:
                    await self._send_end(send, self._failing(to_api_error(problem)))
                    return
            await self._send_end(send)

    async def _send_end(self, send: Send, last: str = "") -> None:
        await send({"type": "http.response.body", "body": last.encode(), "more_body": False})
