"""The middleware that makes spans for requests to the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from server.door.auth import routed_path
from server.tracing.otlp import Tracing
from server.tracing.request import RequestTrace

_CONTEXT = (b"traceparent", b"tracestate")


class TracingMiddleware:
    """Traces requests to the model. `scope["state"]["trace"]` is the request's trace, and its log lines have a
    trace_id. All other requests pass untraced.

    It runs after the authentication, so refused requests can neither fill the collector nor choose trace ids.

    Args:
        tracing: receives the spans.
        paths: exact paths of requests to the model; clients cannot invent names of spans.
    """

    def __init__(self, app: ASGIApp, tracing: Tracing, paths: Collection[str]):
        self._app = app
        self._tracing = tracing
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or (path := routed_path(scope)) not in self._paths:
            await self._app(scope, receive, send)
            return
        trace = RequestTrace(self._tracing, path, _context(scope["headers"]), scope["scheme"])
        scope.setdefault("state", {})["trace"] = trace
        if trace.trace_id is not None:
            bind_contextvars(trace_id=trace.trace_id)
        status: int | None = None

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = status or 500  # answers of the layers outside of this one
            raise
        finally:
            trace.end(status)


def _context(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in headers:
        if name.lower() in _CONTEXT:
            found.setdefault(name.lower().decode(), []).append(value.decode("latin-1"))
    return found
