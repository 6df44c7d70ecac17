"""Refuses requests to a full service early: before a body is read, parsed and checked."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from server.door.auth import routed_path
from server.errors import ApiError

logger = logging.getLogger("octavo.server")

AT_ONCE = 100  # refusals that are answered at once after a pause
PER_SECOND = 25  # refusals per second after these
LONGEST_PAUSE = 1.0  # maximum seconds that a refusal is delayed
MOST_PAUSING = 256  # maximum delayed refusals, each of which holds a connection; beyond that all are answered at once
LOG_INTERVAL = 1.0  # seconds; refusals in between share a log line
# Takes the tenant; raises ApiError if there is no room for any of its requests.
Check = Callable[[str | None], Awaitable[None]]


class FullGate:
    """Middleware: answers 503 if no request to the path would be admitted, and notes when requests arrived
    (`scope["state"]["arrival"]`, seconds of `time.monotonic()`).

    Clients that retry without a pause would take processor time from served requests. So beyond `AT_ONCE` per second,
    refusals are delayed.
    """

    def __init__(
        self,
        app: ASGIApp,
        checks: Mapping[str, Check],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._app = app
        self._checks = checks
        self._clock = clock  # monotonic seconds
        self._pause = pause  # waits for this many seconds
        self._due = float("-inf")  # when the next refusal would be answered at an even pace
        self._num_pausing = 0
        self._num_refused = 0
        self._logged = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            state = scope.setdefault("state", {})
            state["arrival"] = time.monotonic()
            check = self._checks.get(routed_path(scope))
            if check is not None:
                try:
                    await check(state.get("tenant"))
                except ApiError as problem:
                    self._log(problem)
                    await self._slow_down()
                    await problem.response()(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _slow_down(self) -> None:
        """Wait if there are too many refusals. A second's worth of refusals may be answered at once."""
        now = self._clock()
        self._due = min(max(self._due, now - AT_ONCE / PER_SECOND) + 1 / PER_SECOND, now + LONGEST_PAUSE)
        if self._due > now and self._num_pausing < MOST_PAUSING:
            self._num_pausing += 1
            try:
                await self._pause(self._due - now)
            finally:
                self._num_pausing -= 1

    def _log(self, problem: ApiError) -> None:
        """Log at most one line a second, because refusals come in large numbers."""
        self._num_refused += 1
        now = time.monotonic()
        if now - self._logged >= LOG_INTERVAL:
            extra = {"status": problem.status_code, "code": problem.code, "num_refused": self._num_refused}
            logger.info("Refused: %s", problem.message, extra=extra)
            self._logged, self._num_refused = now, 0
