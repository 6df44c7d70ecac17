"""The outermost layer of the app: every request gets an id, and every response carries it, even after an unexpected
error."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars, clear_contextvars

from server.door.gateway import gateway_fields
from server.errors import ApiError, to_api_error

logger = logging.getLogger("octavo.server")

HEADER = b"x-request-id"
NO_SNIFFING = (b"x-content-type-options", b"nosniff")  # browsers must not guess another type
_ACCEPTED = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def new_request_id() -> str:
    return uuid.uuid4().hex


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's id, if it can be used unchanged in headers and logs, else a new one."""
    given = [value for name, value in headers if name.lower() == HEADER]
    if len(given) == 1 and _ACCEPTED.fullmatch(given[0]):
        return given[0].decode()
    return new_request_id()


def client_address(scope: Scope) -> str | None:
    """The client's address for the log; behind an untrusted proxy, the proxy's address."""
    client = scope.get("client")
    return str(client[0]) if client else None


class RequestIdMiddleware:
    """Binds the request's id, and the gateways' headers, to its log lines. Sends the id back as X-Request-ID, and stops
    every exception. All responses also get `NO_SNIFFING`.

    The id is also in `scope["state"]["request_id"]`. The engine never sees it; the engine's ids are the server's own.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own_id = request_id(scope["headers"])
        # A connection's next request may run in the context that the previous one left.
        clear_contextvars()
        bind_contextvars(request_id=own_id, **gateway_fields(scope["headers"]))
        scope.setdefault("state", {})["request_id"] = own_id
        field = (HEADER, own_id.encode())
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", ()), field, NO_SNIFFING]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as problem:
            # Starlette raises an exception again after its error handler has logged and answered it. An exception that
            # arrives here without an answer did not pass that handler.
            if not started:
                await to_api_error(problem).response()(scope, receive, send_with_id)
        except asyncio.CancelledError:
            # The server's time to stop is over. Nothing runs after this, so the task still ends here.
            logger.warning("A request was cancelled because the server is stopping.")
            if not started:
                error = ApiError(503, "The server is stopping.", code="shutting_down", headers={"Connection": "close"})
                await error.response()(scope, receive, send_with_id)
