"""Graceful shutdown: new requests are refused, running ones finish, late ones are interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from server.door.auth import routed_path
from server.errors import ApiError

# Monitoring still needs these, above all while the service stops.
ALWAYS_ANSWERED = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/load", "/metrics"})


def shutting_down() -> ApiError:
    """The answer to a request that comes too late or does not finish in time."""
    return ApiError(
        503,
        "The service is shutting down; send the request to another instance, or try again when it is back.",
        code="shutting_down",
        headers={"Retry-After": "5", "Connection": "close"},
    )


class Drain:
    """The state of a service that may be stopping: whether it is, and how many requests still run. `num_running`:
    requests being answered, without `ALWAYS_ANSWERED`."""

    def __init__(self) -> None:
        self.draining = False
        self.num_running = 0
        self._interruptions: set[asyncio.Future[None]] = set()
        self._waiter: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Refuse new requests from now on; safe in a signal handler."""
        self.draining = True

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing runs, for at most this long; returns whether that was reached."""
        if self.num_running:
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiter], timeout=seconds)
            self._waiter = None
        return not self.num_running

    def interrupt(self) -> None:
        """Tell all running requests to end now."""
        for future in self._interruptions:
            if not future.done():
                future.set_result(None)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context around a request."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            if not self.num_running and self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    @contextmanager
    def interruption(self) -> Iterator[asyncio.Future[None]]:
        """A future that is done when running requests must end."""
        future = asyncio.get_running_loop().create_future()
        self._interruptions.add(future)
        try:
            yield future
        finally:
            self._interruptions.discard(future)


class DrainGate:
    """Middleware: refuses requests while the service stops, and counts those that run."""

    def __init__(self, app: ASGIApp, drain: Drain, rejected: Callable[[str], None]):
        self._app = app  # the app behind it
        self._drain = drain
        self._rejected = rejected  # called for each refused request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or routed_path(scope) in ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
        elif self._drain.draining:
            self._rejected("shutting_down")
            await shutting_down().response()(scope, receive, send)
        else:
            with self._drain.running():
                await self._app(scope, receive, send)
