"""Sends spans to a collector: OTLP over HTTP, with OpenTelemetry's own SDK."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

FLUSH_SECONDS = 3.0  # for the last spans, when the service stops

logger = logging.getLogger("octavo.server")


class Tracing:
    """Makes spans and sends them in batches, from a separate thread.

    Requests never wait for the collector: spans beyond OTEL_BSP_MAX_QUEUE_SIZE are dropped. OpenTelemetry's variables
    apply: for the service's name and attributes, the sampler, batches, and the exporter's headers and certificates.

    Args:
        endpoint: the URL for spans, including its path.
        version: the service's version, sent with every batch.
    """

    def __init__(self, endpoint: str, version: str):
        named = {"service.name": "octavo", "service.version": version, **OTELResourceDetector().detect().attributes}
        # The service ends this itself, not the interpreter's exit.
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("octavo", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Mapping[str, list[str]], start: int) -> Span:
        """Begin a span for a request, as a child of its client's span if W3C's trace context names one; times are Unix
        nanoseconds. A malformed or repeated traceparent begins a new trace. `headers`: `traceparent` and `tracestate`,
        if sent."""
        alone = len(headers.get("traceparent", ())) == 1
        parent = self._propagator.extract(headers, Context()) if alone else Context()
        return self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=start)

    def within(self, span: Span, name: str, start: int, end: int) -> None:
        """A finished child of `span`."""
        child = self._tracer.start_span(name, set_span_in_context(span, Context()), start_time=start)
        child.end(end)

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send the remaining spans, for at most this long. Spans that the collector has not accepted by then are
        lost."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(seconds)
        if last.is_alive():
            logger.warning("The trace collector did not answer in time: spans of the last requests are lost.")
