"""Middleware for differences between Serve and our own server."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.door.request_id import HEADER

_PATIENCE = 5.0  # seconds to end unwanted work, which takes a step of the engine


class CarriedByServe:
    """The outermost middleware. If a client disconnects, Serve cancels the request's task. This middleware instead
    sends the app `http.disconnect`, as servers do, so that the app can end and count its work. It also removes the
    request id that Serve adds to each response, because the app sends its own."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        left = asyncio.Event()
        answer = asyncio.ensure_future(self._app(scope, _heard(receive, left), _without_id(send)))
        try:
            await asyncio.shield(answer)
        except asyncio.CancelledError:
            left.set()
            _, late = await asyncio.wait({answer}, timeout=_PATIENCE)
            for task in late:
                task.cancel()
            raise


def _heard(receive: Receive, left: asyncio.Event) -> Receive:
    """`receive`, which also reports a disconnect when `left` is set."""

    async def hear() -> Message:
        message = asyncio.ensure_future(receive())
        leaving = asyncio.ensure_future(left.wait())
        try:
            await asyncio.wait({message, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            leaving.cancel()

    return hear


def _without_id(send: Send) -> Send:
    async def send_on(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [field for field in message.get("headers", ()) if field[0].lower() != HEADER]
        await send(message)

    return send_on
