"""Limits on the size and duration of requests.

FastAPI's own `max_body_size` counts bytes too, but has no deadline, and its error names neither the setting nor the
value.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.door.auth import routed_path
from server.door.request_id import client_address
from server.errors import ApiError

logger = logging.getLogger("octavo.server")

BODY_GRACE = 30.0  # base seconds for a body to arrive
BODY_RATE = 8 * 1024  # each additional amount of this many bytes adds a second
_CLOSE = {"Connection": "close"}  # the rest of the body is not awaited


class BodyLimitMiddleware:
    """Refuses a body that is too large (413) or takes too long to arrive (408). If the body's length is stated, a large
    one is refused before it is read, otherwise while it is read. `needed`: the maximum bytes of a body by path, where
    that is less."""

    def __init__(
        self, app: ASGIApp, *, max_body_size: int, needed: Mapping[str, int] | None = None, grace: float = BODY_GRACE
    ):
        self._app = app
        self._limit = max_body_size  # bytes
        self._needed = needed or {}
        self._grace = grace  # base seconds; see BODY_GRACE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = client_address(scope)
        limit = _Limit(self._limit)
        needed = self._needed.get(routed_path(scope), self._limit)
        if needed < self._limit:
            limit = _Limit(needed, routed_path(scope))
        try:
            _check_length(scope, limit)
        except ApiError as problem:
            _log(problem, client)
            await problem.response()(scope, receive, send)
        else:
            await self._app(scope, _Body(receive, limit, self._grace, client), send)


@dataclass(frozen=True, slots=True)
class _Limit:
    size: int  # bytes
    path: str | None = None  # the path whose limit is lower than the others', if any

    def refusal(self, what: str) -> ApiError:
        """The error for a longer body."""
        rule, advice = "max_body_size", "Send less, or start the server with --max-body-size."
        if self.path is not None:
            rule, advice = f"for {self.path}, from the model's limits", "Send less in one request."
        message = f"{what}; the limit is {self.size} ({rule}). {advice}"
        return ApiError(413, message, code="body_too_large", headers=_CLOSE)


def _check_length(scope: Scope, limit: _Limit) -> None:
    given = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
    if not given:
        return
    if len(given) > 1 or not given[0].isdigit():  # bytes: ASCII digits
        message = "Content-Length must be given once, as a number of bytes."
        raise ApiError(400, message, code="malformed_request", headers=_CLOSE)
    # A number with too many digits is not even converted.
    digits = given[0].lstrip(b"0")
    if len(digits) > 18 or int(digits or b"0") > limit.size:
        raise limit.refusal(f"The body has {digits[:20].decode()} bytes")


class _Body:
    def __init__(self, receive: Receive, limit: _Limit, grace: float, client: str | None):
        self._receive = receive
        self._limit = limit
        self._grace = grace
        self._client = client
        self._began = asyncio.get_running_loop().time()
        self._received = 0
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:  # only the client's disconnect can come now, however late
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._began + self._grace + self._received / BODY_RATE):
                message = await self._receive()
        except TimeoutError:
            problem = self._too_slow()
            _log(problem, self._client)
            raise problem from None
        self._received += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._received > self._limit.size:
            problem = self._limit.refusal(f"The body has more than {self._limit.size} bytes ({self._received} so far)")
            _log(problem, self._client)
            raise problem
        return message

    def _too_slow(self) -> ApiError:
        message = (
            f"The body did not arrive in time: {self._received} bytes came in {self._grace:g} seconds plus one "
            f"second per {BODY_RATE} bytes."
        )
        return ApiError(408, message, code="request_timeout", headers=_CLOSE)


def _log(problem: ApiError, client: str | None) -> None:
    extra = {"status": problem.status_code, "code": problem.code, "client": client}
    logger.info("Refused: %s", problem.message, extra=extra)
