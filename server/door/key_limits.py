"""Limits of a key: requests per minute, and concurrent requests."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.door.auth import asks_for_kept, is_inference
from server.door.key_counts import CountsKeys
from server.door.keys import ApiKey
from server.door.rates import RateWindow
from server.door.request_id import client_address
from server.errors import ApiError

logger = logging.getLogger("octavo.server")

_SOON = 1  # seconds, because the end of a running request is unknown


class KeyLimitsMiddleware:
    """Middleware that answers 429 to requests beyond their key's limits, before the body is read. Headers tell the
    client how many requests the key has left. Requests that do not use the model are not counted."""

    def __init__(self, app: ASGIApp, *, counts: CountsKeys, rejected: Callable[[str], None]):
        self._app = app
        self._counts = counts  # counts the running requests of keys, and their requests per minute
        self._rejected = rejected  # called with the reason for each refused request: key_rate or key_concurrency

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope.get("state", {}).get("api_key")
        if scope["type"] != "http" or key is None or not is_inference(scope):
            await self._app(scope, receive, send)
            return
        kept = asks_for_kept(scope)
        begun = await self._counts.begin(key.tenant, None if kept else key.max_concurrency, key.requests_per_minute)
        if begun.counted:
            if kept:  # a client may always query an answer that it waits for, however many requests of the key run
                self._counts.end(key.tenant)
            try:
                await self._app(scope, receive, send if begun.window is None else _with_headers(send, begun.window))
            finally:
                if not kept:
                    self._counts.end(key.tenant)
            return
        refusal = self._too_many(key, begun.running) if begun.window is None else self._too_often(begun.window)
        extra = {"status": refusal.status_code, "code": refusal.code, "client": client_address(scope)}
        logger.info("Refused: %s", refusal.message, extra=extra)
        await refusal.response()(scope, receive, send)

    def _too_many(self, key: ApiKey, running: int) -> ApiError:
        self._rejected("key_concurrency")
        message = (
            f"This API key has {running} requests running, but may have only {key.max_concurrency} at the same time. "
            "Wait until one has ended; the server's settings are --key-max-concurrency and concurrency= in the key "
            "file."
        )
        return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(_SOON)})

    def _too_often(self, window: RateWindow) -> ApiError:
        self._rejected("key_rate")
        message = (
            f"This API key has made all {window.limit} requests that it may make per minute. Try again in "
            f"{window.reset} seconds; the server's settings are --key-requests-per-minute and rpm= in the key file."
        )
        headers = {"Retry-After": str(window.reset), **_headers(window)}
        return ApiError(429, message, code="rate_limit_exceeded", headers=headers)


def _headers(window: RateWindow) -> dict[str, str]:
    return {
        "x-ratelimit-limit-requests": str(window.limit),
        "x-ratelimit-remaining-requests": str(window.remaining),
        "x-ratelimit-reset-requests": f"{window.reset}s",
    }


def _with_headers(send: Send, window: RateWindow) -> Send:
    added = [(name.encode(), value.encode()) for name, value in _headers(window).items()]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return send_with_headers
