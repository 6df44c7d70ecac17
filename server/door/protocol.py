"""uvicorn's HTTP protocol on httptools, with limits, deadlines and the service's own error responses.

httptools' parser (llhttp) is strict about fields that enable request smuggling: Content-Length beside
Transfer-Encoding, repeated or malformed lengths, folded headers, bare line feeds, control characters. This module adds
the missing checks: the bytes, fields and time of a request's head, supported versions and transfer codings, trailers
(dropped), and bodies that are not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from engine import parse_bytes
from server.config.settings import ServerSettings
from server.door.connection import WatchedProtocol, unsent
from server.door.request_id import HEADER, RequestIdMiddleware, new_request_id
from server.door.slots import Slot, Slots
from server.errors import ApiError, shown, to_api_error

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

logger = logging.getLogger("octavo.server")

MAX_HEADER_FIELDS = 100
HEAD_TIMEOUT = 30.0  # seconds from the first byte of a connection or request to the end of the request's head
LINGER = 5.0  # seconds that a refused client may continue to send, so that it can read the answer first
# Maximum bytes of chunk sizes, extensions and trailers per byte of the body, in addition to one maximum head.
_FRAMING_PER_BYTE = 16


class _RefusedError(Exception):
    """Carries the response out of a callback of the parser."""

    def __init__(self, status: int, message: str, code: str = "malformed_request"):
        super().__init__(message)
        self.answer = ApiError(status, message, code=code)


class _LingeringTransport:
    """The connection's transport, whose `close` the protocol carries out."""

    def __init__(self, transport: asyncio.Transport, protocol: BoundedHttpProtocol):
        self._transport = transport
        self._protocol = protocol
        self.write = transport.write  # the hot path of every token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._protocol.lingers or self._transport.is_closing()

    def close(self) -> None:
        self._protocol.close_gently(self._transport)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. `slot`: the connection's slot; None if connections are not limited."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        max_header_size: int,
        head_timeout: float = HEAD_TIMEOUT,
        slot: Slot | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self.lingers = False  # whether the last answer is written; further input is discarded until the client closes
        self._limit = max_header_size  # maximum bytes of a request's head: its first line and its headers
        self._head_timeout = head_timeout  # maximum seconds; see HEAD_TIMEOUT
        self._slot = slot or Slot(Slots(), is_reserve=False)
        self._served = self.app
        self._in_head = self._in_body = False
        self._deaf = False  # the parser has lost its position
        self._head_seen = 0  # bytes received for an incomplete head
        self._head_size = 0  # bytes of its known parts
        self._body_seen = self._body_size = 0  # bytes received, and bytes of the body among them
        self._head_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------ the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._slot.drop = transport.abort
        # While paused: under TLS, bytes may wait in a buffer that the transport does not count.
        self._slot.unsent = lambda: unsent(transport) or int(self.flow.write_paused)
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lingers = self._deaf = True
        self._slot.close()
        for timer in (self._head_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server stops: connections whose requests are answered are not read any more."""
        super().shutdown()
        if self.lingers:
            self.transport.close()

    def close_gently(self, transport: asyncio.Transport) -> None:
        """Close the connection. If the client is still sending, wait until it stops, for a limited time.

        Closing a socket with unread input resets the connection, and the client may lose the answer."""
        if self.lingers or not (self._in_body or self._deaf):
            transport.close()
            return
        self.lingers = True
        if transport.can_write_eof():
            transport.write_eof()
        self.flow.resume_reading()
        self._rest_timer = self._later(self._rest_timer, LINGER, transport.close)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and check what it does not check itself."""
        if self._deaf:
            return
        self._slot.stir()
        self._unset_keepalive_if_required()
        if self._in_body:
            self._body_seen += len(data)
        else:
            self._head_seen += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as problem:
            self._refuse(_answer(problem))
            return
        if self._in_body:
            if self._body_seen - self._body_size > self._limit + _FRAMING_PER_BYTE * self._body_size:
                message = (
                    "The chunk sizes, chunk extensions and trailers of the body take too many bytes "
                    f"({self._body_seen - self._body_size} for {self._body_size} bytes of body)."
                )
                self._refuse(ApiError(400, message, code="malformed_request"))
        elif self._head_seen > self._limit:
            self._refuse(self._head_too_large(self._head_seen).answer)
        elif self._in_head or self._head_seen:
            self._expect_head()

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # A server may ignore a request to upgrade the protocol, and this one does. The parser has taken the
                # request for one without a body, so a new parser reads it again without the upgrade.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    # ------------------------------------------------------------ the parser's callbacks

    def on_message_begin(self) -> None:
        if self.lingers:
            raise _RefusedError(400, "The connection has ended.")
        super().on_message_begin()
        self._in_head = True
        self._head_size = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: as a header it could pass for one that a proxy has checked
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= MAX_HEADER_FIELDS:
            message = f"The request's header has more than {MAX_HEADER_FIELDS} fields, which is the limit."
            raise _RefusedError(431, message, "header_too_large")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        if self.parser.should_upgrade():
            return  # see `_feed`
        refusal = self._slot.ask(httptools.parse_url(self.url).path)
        self.app = self._served if refusal is None else _app(refusal)
        super().on_headers_complete()
        if self._slot.is_reserve:
            self.cycle.keep_alive = False
        self._in_head, self._in_body = False, True
        self._head_seen = self._body_seen = self._body_size = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_head:
            return  # how the parser sees a request with an upgrade
        self._in_body = False
        super().on_message_complete()
        if self._rest_timer is not None:  # the rest of a body that was answered already
            self._rest_timer.cancel()
            self._rest_timer = None
            if self.lingers:
                self.transport.close()
            else:
                self._rest()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._rest()
        if self._head_timer is not None:  # the next request's, which may not have been read while this one ran
            self._head_timer = self._later(self._head_timer, self._head_timeout, self._head_is_late)
        if self._in_body and not self.transport.is_closing():
            # Answered without its body, which a client may send in full before it reads, so it gets some time.
            self._rest_timer = self._later(self._rest_timer, LINGER, self.transport.close)

    def _rest(self) -> None:
        """The slot may go to another connection if all requests are answered and none has begun."""
        if self.cycle.response_complete and not self._in_body and not self.transport.is_closing():
            self._slot.rest()

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > self._limit:
            raise self._head_too_large(self._head_size)

    def _head_too_large(self, size: int) -> _RefusedError:
        message = (
            f"The request's first line and header have more than {self._limit} bytes (at least {size}), which is "
            "the limit (max_header_size). Send less, or start the server with --max-header-size."
        )
        return _RefusedError(431, message, "header_too_large")

    def _check_head(self) -> None:
        version, method = self.parser.get_http_version(), self.parser.get_method()
        if version not in ("1.0", "1.1"):
            raise _RefusedError(400, f"This server speaks HTTP/1.1 and HTTP/1.0, not HTTP/{version}.")
        if method == b"CONNECT":
            raise _RefusedError(400, "This server is not a proxy and does not support CONNECT.")
        if not self.url.startswith(b"/") and httptools.parse_url(self.url).path is None:
            raise _RefusedError(400, "The request's target has no path.")
        names = [name for name, _ in self.headers]
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            raise _RefusedError(400, f"A request must have one Host header, got {names.count(b'host')}.")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or version == "1.0"):
            message = f"The only transfer coding is chunked, in HTTP/1.1; got {shown(b', '.join(codings))}."
            raise _RefusedError(400, message)

    # ------------------------------------------------------------ deadlines and refusals

    def _later(self, timer: asyncio.TimerHandle | None, seconds: float, act: Callable[[], None]) -> asyncio.TimerHandle:
        if timer is not None:
            timer.cancel()
        return self.loop.call_later(seconds, act)

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._deaf:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # reading may have been paused for the previous request
        elif self._in_head or self._head_seen:
            message = f"The request's header did not arrive within {self._head_timeout:g} seconds."
            self._refuse(ApiError(408, message, code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer an invalid request and end the connection."""
        self._deaf = True
        cycle = self.cycle
        if self.lingers:
            return
        if self._in_body and cycle.response_complete:
            self.transport.close()  # the invalid request has had its answer
            return
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:  # the previous request is valid and gets its answer first
                cycle.keep_alive = False
                return
            if self.pipeline:  # its error waits for its turn
                answer = ApiError(error.status_code, error.message, code=error.code, headers={"Connection": "close"})
                self.pipeline[0] = (cycle, _app(answer))
                return
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        own_id = new_request_id()
        client = self.client[0] if self.client else None
        extra = {"status": error.status_code, "code": error.code, "client": client, "request_id": own_id}
        logger.info("Refused: %s", error.message, extra=extra)
        body = error.body().encode()
        lines = [STATUS_LINE[error.status_code]]
        fields = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (HEADER, own_id.encode()),
        ]
        lines += [b"%s: %s\r\n" % field for field in fields]
        self.transport.write(b"".join(lines) + b"\r\n" + body)
        self.transport.close()


def http_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=...)`: with limits, and with a watch on clients that read nothing."""
    watched = type(
        "HttpProtocol", (WatchedProtocol, BoundedHttpProtocol), {"stall_timeout": settings.stream_stall_timeout}
    )
    # uvicorn only calls it.
    limit = parse_bytes(settings.max_header_size, "max_header_size")
    return cast(type[asyncio.Protocol], partial(watched, max_header_size=limit))


def _app(error: ApiError) -> ASGI3Application:
    return cast("ASGI3Application", RequestIdMiddleware(error.response()))


def _answer(problem: httptools.HttpParserError) -> ApiError:
    """The response to a parser's error; if a callback raised the error, its context has the reason."""
    reason = problem.__context__ if isinstance(problem, httptools.HttpParserCallbackError) else problem
    if isinstance(reason, _RefusedError):
        return reason.answer
    if isinstance(reason, httptools.HttpParserError | ValueError):
        message = f"The request is not valid HTTP/1.1: {shown(str(reason))}."
        return ApiError(400, message, code="malformed_request")
    return to_api_error(reason if isinstance(reason, Exception) else problem)
