"""HEAD wherever there is GET."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEAD = "octavo.head"  # in the scope of what came as HEAD


class HeadMiddleware:
    """Answers HEAD as GET would, without the body: probes and proxies ask so, and routes know GET only. One whose body
    has no end finds `HEAD` in the scope."""

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
