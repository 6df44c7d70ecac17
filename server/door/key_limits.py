"""What a key may ask of the model: requests a minute, and requests at the same time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.door.auth import is_inference
from server.door.keys import ApiKey
from server.door.rates import RequestRates, Window
from server.door.request_id import client_address
from server.errors import ApiError

logger = logging.getLogger("octavo.server")

_SOON = 1  # seconds; when a running request will end is not known


class KeyLimitsMiddleware:
    """Answers 429 to what goes beyond the limits of the request's key, before anything of the body is read, and tells
    the key in headers how many requests it has left. What does not ask the model for anything is not counted.

    Args:
        rates: counts requests a minute.
        rejected: told why, for each refused request: key_rate or key_concurrency.
    """

    def __init__(self, app: ASGIApp, *, rates: RequestRates, rejected: Callable[[str], None]):
        self._app = app
        self._rates = rates
        self._rejected = rejected
        self._running: Counter[str] = Counter()  # by tenant; those that run none are not in it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope.get("state", {}).get("api_key")
        if scope["type"] != "http" or key is None or not is_inference(scope):
            await self._app(scope, receive, send)
            return
        refusal = self._too_many(key)
        if refusal is None:
            with self._counted(key):
                window = None
                if key.requests_per_minute is not None:
                    window = await self._rates.take(key.tenant, key.requests_per_minute)
                refusal = self._too_often(window)
                if refusal is None:
                    await self._app(scope, receive, send if window is None else _with_headers(send, window))
                    return
        extra = {"status": refusal.status_code, "code": refusal.code, "client": client_address(scope)}
        logger.info("Refused: %s", refusal.message, extra=extra)
        await refusal.response()(scope, receive, send)

    @contextmanager
    def _counted(self, key: ApiKey) -> Iterator[None]:
        self._running[key.tenant] += 1
        try:
            yield
        finally:
            self._running[key.tenant] -= 1
            if not self._running[key.tenant]:
                del self._running[key.tenant]

    def _too_many(self, key: ApiKey) -> ApiError | None:
        limit = key.max_concurrency
        if limit is None or self._running[key.tenant] < limit:
            return None
        self._rejected("key_concurrency")
        message = (
            f"This API key has {self._running[key.tenant]} requests running, and may have {limit} at the same time. "
            "Wait until one has ended; the server's settings are --key-max-concurrency and concurrency= in the key "
            "file."
        )
        return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(_SOON)})

    def _too_often(self, window: Window | None) -> ApiError | None:
        if window is None or window.allowed:
            return None
        self._rejected("key_rate")
        message = (
            f"This API key may make {window.limit} requests a minute, and has made them. Try again in {window.reset} "
            "seconds; the server's settings are --key-requests-per-minute and rpm= in the key file."
        )
        headers = {"Retry-After": str(window.reset), **_headers(window)}
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def _headers(window: Window) -> dict[str, str]:
    """As OpenAI names them."""
    return {
        "x-ratelimit-limit-requests": str(window.limit),
        "x-ratelimit-remaining-requests": str(window.remaining),
        "x-ratelimit-reset-requests": f"{window.reset}s",
    }


def _with_headers(send: Send, window: Window) -> Send:
    added = [(name.encode(), value.encode()) for name, value in _headers(window).items()]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return send_with_headers
