"""The spans of one request: the server's span, and spans for the phases in its record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode, format_trace_id

from server.answering.observation import RequestRecord
from server.tracing.otlp import Tracing

MAX_REASONS = 128  # of many answers, only this many are reported
# Operations named in OpenTelemetry's conventions for generative AI; others are named by the end of their path.
_OPERATIONS = {"completions": "text_completion", "chat/completions": "chat"}


class RequestTrace:
    """A request's span, from its arrival to its last byte. It contains no text from a client.

    Args:
        path: the route's path.
        headers: as in `Tracing.begin`.
    """

    def __init__(self, tracing: Tracing, path: str, headers: Mapping[str, list[str]], scheme: str):
        # One offset for all times of the request, so that setting the clock meanwhile cannot disorder its spans.
        self._offset = time.time_ns() - time.monotonic_ns()
        self._tracing = tracing
        self._span: Span = tracing.begin(f"POST {path}", headers, self._now())
        context = self._span.get_span_context()
        self.trace_id = format_trace_id(context.trace_id) if context.is_valid else None
        operation = path.removeprefix("/v1").removeprefix("/v2").strip("/")
        self._span.set_attributes(
            {
                "http.request.method": "POST",
                "http.route": path,
                "url.path": path,
                "url.scheme": scheme,
                "gen_ai.operation.name": _OPERATIONS.get(operation, operation),
                "gen_ai.provider.name": "octavo",
            }
        )
        self._problem: str | None = None
        self._failed = False

    def tell(self, record: RequestRecord, outcome: str, facts: Mapping[str, Any]) -> None:
        """End the trace with the request's complete record. Its phases become child spans, its usage becomes
        attributes."""
        if not self._span.is_recording():
            return
        for name, (start, end) in record.phases().items():
            first = self._unix(start)
            self._tracing.within(self._span, name, first, max(first, self._now() if end is None else self._unix(end)))
        usage = record.usage()
        self._span.set_attributes(
            {
                "octavo.outcome": outcome,
                "gen_ai.request.model": record.model,
                "gen_ai.response.model": record.model,
                "gen_ai.response.id": record.id,
                "gen_ai.request.stream": record.stream,
                "gen_ai.request.choice.count": record.n,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
        )
        reasons = [reason for reason in usage.finish_reasons if reason is not None]
        if reasons:
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons[:MAX_REASONS])
        if usage.first_token is not None:
            self._span.set_attribute("gen_ai.latency.time_to_first_token", max(0.0, usage.first_token - record.arrival))
        if outcome != "ok":
            reason = outcome.removeprefix("aborted:")
            self._problem = str(facts.get("code") or facts.get("error") or reason)
            self._failed = reason not in ("refused", "disconnect")

    def end(self, status: int | None) -> None:
        """The last byte is sent, or there will be none. `status`: status of the answer; None if there was none."""
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        failed = self._failed or (status is None and self._problem is None) or (status or 0) >= 500
        if self._problem is None and (failed or (status or 0) >= 400):
            self._problem = str(status or "cancelled")
        if self._problem is not None:
            self._span.set_attribute("error.type", self._problem)
        if failed:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(self._now())

    def _now(self) -> int:
        return time.monotonic_ns() + self._offset

    def _unix(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._offset
