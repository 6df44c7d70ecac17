"""Spans on their way to a collector: OTLP over HTTP, by OpenTelemetry's own SDK."""

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
    """Makes spans and sends them in batches, from a thread of its own.

    Requests never wait for the collector: spans beyond OTEL_BSP_MAX_QUEUE_SIZE are dropped. OpenTelemetry's variables
    for the service's name and attributes, the sampler, batches, headers and certificates of the exporter count.

    Args:
        endpoint: URL that spans are posted to, its path included.
        version: of the service, told with every batch.
    """

    def __init__(self, endpoint: str, version: str):
        named = {"service.name": "octavo", "service.version": version, **OTELResourceDetector().detect().attributes}
        # The service ends this in its own time, and not whenever the interpreter exits.
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("octavo", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Mapping[str, list[str]], start: int) -> Span:
        """A span for a request, a child of its client's where W3C's trace context says of which; times are Unix
        nanoseconds. A traceparent that is malformed, or is there twice, begins a trace of its own.

        Args:
            headers: `traceparent` and `tracestate`, where they were sent.
        """
        alone = len(headers.get("traceparent", ())) == 1
        parent = self._propagator.extract(headers, Context()) if alone else Context()
        return self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=start)

    def within(self, span: Span, name: str, start: int, end: int) -> None:
        """A child of `span` that is over."""
        child = self._tracer.start_span(name, set_span_in_context(span, Context()), start_time=start)
        child.end(end)

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Send the remaining spans, for at most so long. Spans that the collector has not taken by then are lost."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(seconds)
        if last.is_alive():
            logger.warning("The trace collector did not answer in time: spans of the last requests are lost.")
