"""Supports HEAD wherever GET works."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEAD = "octavo.head"  # key in the scope of a HEAD request


class HeadMiddleware:
    """Answers HEAD like GET without the body, because probes and proxies send HEAD and routes only know GET. A route
    whose body has no end checks `HEAD` in the scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET", HEAD: True}, receive, without_body)
