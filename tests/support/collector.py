"""A collector of traces that listens on this machine: OTLP over HTTP, as protobuf."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.service import PATIENCE


@dataclass(frozen=True)
class Span:
    """A span as it arrived; ids in hexadecimal, "" where there is none; times in Unix nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    kind: int
    status: int
    start: int
    end: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Collector:
    """What was sent.

    Attributes:
        url: where spans are posted to.
        answering: while clear, no export is answered.
        asked: an export has come, answered or not.
        raw: the bodies, unpacked.
        headers: of the exports.
    """

    url: str = ""
    answering: threading.Event = field(default_factory=threading.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    spans: list[Span] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def tree(self) -> tuple[Span, dict[str, Span]]:
        """The one server span, and its children by name."""
        (server,) = [span for span in self.spans if span.kind == 2]
        others = [span for span in self.spans if span.kind != 2]
        children = {span.name: span for span in others}
        assert len(children) == len(others)
        for child in others:
            assert (child.trace_id, child.parent_id) == (server.trace_id, server.span_id)
            assert server.start <= child.start <= child.end <= server.end
        return server, children


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector, until the end."""
    found = Collector()
    found.answering.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.asked.set()
            assert found.answering.wait(PATIENCE)
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            found.raw.append(body)
            found.headers.append(dict(self.headers.items()))
            found.spans.extend(_spans(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield found
        finally:
            found.answering.set()
            server.shutdown()
            thread.join()


def _spans(body: bytes) -> Iterator[Span]:
    for group in ExportTraceServiceRequest.FromString(body).resource_spans:
        resource = {item.key: _value(item.value) for item in group.resource.attributes}
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    state=span.trace_state,
                    kind=span.kind,
                    status=span.status.code,
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes={item.key: _value(item.value) for item in span.attributes},
                    resource=resource,
                )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
