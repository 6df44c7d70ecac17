"""Refusal of requests that would need memory while there is too little."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from server.memory import MemoryGuard


class MemoryGate:
    """Middleware: refuses requests with a body, before that is read, while the process has too much memory.

    Args:
        app: what it guards.
        guard: knows.
        rejected: told about each refused request.
    """

    def __init__(self, app: ASGIApp, guard: MemoryGuard, rejected: Callable[[str], None]):
        self._app = app
        self._guard = guard
        self._rejected = rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the app answer."""
        if scope["type"] == "http" and scope["method"] == "POST" and self._guard.exceeded():
            self._rejected("memory")
            await self._guard.refusal().response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)
