"""A full service refuses at the door: before a body is read, parsed and checked for nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from server.door.auth import routed_path
from server.errors import ApiError

logger = logging.getLogger("octavo.server")

LOG_INTERVAL = 1.0  # seconds; refusals in between share a line
# Takes the tenant; raises ApiError if there is no room for any request of it.
Check = Callable[[str | None], Awaitable[None]]


class FullGate:
    """Middleware: answers 503 where no request to that path would be admitted, and notes when requests arrived
    (`scope["state"]["arrival"]`, seconds of `time.monotonic()`).

    Args:
        checks: by path.
    """

    def __init__(self, app: ASGIApp, checks: Mapping[str, Check]):
        self._app = app
        self._checks = checks
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
                    await problem.response()(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _log(self, problem: ApiError) -> None:
        """One line a second at most: refusals are many at a time."""
        self._num_refused += 1
        now = time.monotonic()
        if now - self._logged >= LOG_INTERVAL:
            extra = {"status": problem.status_code, "code": problem.code, "num_refused": self._num_refused}
            logger.info("Refused: %s", problem.message, extra=extra)
            self._logged, self._num_refused = now, 0
