"""Gives errors the shapes that clients of other servers expect: Anthropic's for /v1/messages and for Anthropic's
clients, text-embeddings-inference's for its endpoints, and Ollama's below /api/."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.door.auth import routed_path

MESSAGES_PATH = "/v1/messages"
VERSION_HEADER = "anthropic-version"  # Anthropic's clients, and no others, send this header with every request
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def message_error(status: int, message: str) -> dict[str, Any]:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


# Paths that only text-embeddings-inference has, so that they identify the client.
TEXT_EMBEDDINGS_PATHS = ("/embed", "/embed_sparse", "/embed_all", "/predict", "/similarity", "/info")


def text_embeddings_error(status: int, message: str) -> dict[str, Any]:
    kind = "Overloaded" if status in (429, 503) else "Backend" if status >= 500 else "Validation"
    return {"error": message, "error_type": kind}


OLLAMA_PATHS = "/api/"  # the beginning of Ollama's


def ollama_error(status: int, message: str) -> dict[str, Any]:
    return {"error": message}


class MessageErrors:
    """Middleware: gives errors of these paths their shape."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = routed_path(scope)
            if path.startswith(OLLAMA_PATHS):
                send = _Reshaped(send, ollama_error)
            elif _is_messages(path) or any(name == VERSION_HEADER.encode() for name, _ in scope["headers"]):
                send = _Reshaped(send, message_error)
            elif path in TEXT_EMBEDDINGS_PATHS:
                send = _Reshaped(send, text_embeddings_error)
        await self._app(scope, receive, send)


def _is_messages(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/")


class _Reshaped:
    """The `send` callable of one request. Errors are sent in one piece; other data is not held back."""

    def __init__(self, send: Send, shape: Callable[[int, str], dict[str, Any]]):
        self._send = send
        self._shape = shape
        self._start: Message | None = None  # an error whose body is awaited
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            self._start = message
        elif self._start is None or message["type"] != "http.response.body":
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)

    async def _finish(self, start: Message) -> None:
        try:
            said = json.loads(self._body)["error"]["message"]
        except (ValueError, KeyError, TypeError):  # not this server's error body, such as an empty one
            body = self._body
        else:
            body = json.dumps(self._shape(start["status"], said)).encode()
        headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})
