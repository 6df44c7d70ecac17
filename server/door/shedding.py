"""Refuses requests that need memory while memory is short."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from server.memory import MemoryGuard


class MemoryGate:
    """Middleware: refuses requests with a body, before it is read, while the process uses too much memory."""

    def __init__(self, app: ASGIApp, guard: MemoryGuard, rejected: Callable[[str], None]):
        self._app = app  # the app behind it
        self._guard = guard
        self._rejected = rejected  # called for each refused request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and self._guard.exceeded():
            self._rejected("memory")
            await self._guard.refusal().response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)
