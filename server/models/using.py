"""The use of a model by one request: from its choice to the last byte of the answer, including the wait for its
load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.answering.streaming import COMMENT, ClientGoneError, Wanted
from server.door.auth import routed_path
from server.door.drain import Drain
from server.door.message_errors import MESSAGES_PATH, message_error
from server.errors import ApiError

_KEY = "octavo.use"
_RESPONSES_PATH = "/v1/responses"
_CLOSED = 499  # nginx's status for a client that has left; nobody reads it


class Usable(Protocol):
    """A model that counts its requests."""

    def begin(self) -> None:
        """Record that a request uses the model."""

    def end(self) -> None:
        """Record that a request has ended."""


class UseGate:
    """Middleware: each request gets a `Use`, which ends with the answer."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        use = scope[_KEY] = Use(scope, receive, send)
        try:
            await self._app(scope, receive, use.send)
        finally:
            use.end()


class Use:
    """One request's use of a model."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self._scope = scope
        self._receive = receive
        self._send = send
        self._used: Usable | None = None
        self._early = False  # whether the answer has begun with comments
        self._status = 200
        self._error: bytes | None = None  # the body of an error after that

    @staticmethod
    def of(request: Request) -> Use:
        use = request.scope[_KEY]
        assert isinstance(use, Use)
        return use

    def begin(self, model: Usable) -> None:
        """The request has chosen its model."""
        self.end()
        self._used = model
        model.begin()

    def end(self) -> None:
        """The request is over."""
        if self._used is not None:
            self._used.end()
            self._used = None

    async def wait(
        self, work: Coroutine[Any, Any, None], drain: Drain, keepalive: float, interrupted: Callable[[str], None]
    ) -> None:
        """Wait for the model, as long as the client waits. Raises ApiError if `work` fails, the client has left, or the
        service stops.

        Args:
            work: ends when the model serves.
            keepalive: seconds after which a stream gets a comment, again and again; 0: it gets none.
            interrupted: returns the reason if nobody waits any more.
        """
        wanted = Wanted(drain, interrupted)
        try:
            await wanted.run(self._scope, self._receive, self._commented(work, keepalive))
        except ClientGoneError:
            raise ApiError(_CLOSED, "The client left before the model had loaded.", code="client_gone") from None

    async def _commented(self, work: Coroutine[Any, Any, None], keepalive: float) -> None:
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=keepalive or None)
                if not task.done():
                    await self._comment()
        finally:
            task.cancel()
        await task

    async def _comment(self) -> None:
        if not self._early:
            self._early = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": COMMENT.encode(), "more_body": True})

    async def send(self, message: Message) -> None:
        """Send a part of the answer. If it has begun with comments, an error becomes its last event."""
        if not self._early:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
            self._error = b"" if self._status >= 400 else None
        elif self._error is None or message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send({"type": "http.response.body", "body": self._failure(self._error)})

    def _failure(self, body: bytes) -> bytes:
        """The event for an error, in the format of the endpoint's streams."""
        path, said = routed_path(self._scope), json.loads(body)
        if path.startswith(MESSAGES_PATH):
            said = message_error(self._status, said["error"]["message"])
            return f"event: error\ndata: {json.dumps(said)}\n\n".encode()
        if path.startswith(_RESPONSES_PATH):
            error = said["error"]
            event = {"type": "error", "sequence_number": 0, "code": error["code"], "message": error["message"]}
            return f"event: error\ndata: {json.dumps(event | {'param': error['param']})}\n\n".encode()
        return b"data: " + json.dumps(said).encode() + b"\n\n"
