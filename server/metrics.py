"""Prometheus metrics of one app: what the engine reports, and what only the server sees."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine import EngineDeadError
from engine.client import EngineClient
from server.admission import Admission

logger = logging.getLogger("octavo.server")

# The buckets of vLLM's time to first token, for dashboards that people already have.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0
)  # fmt: skip

_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("computed_tokens", "Tokens that went through the model.", "computed_tokens"),
    ("num_preemptions", "Requests put back to waiting for lack of pages.", "num_preemptions"),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hits"),
    ("page_copies", "Pages copied because a sequence was about to write a shared one.", "num_page_copies"),
    ("steps", "Engine steps.", "num_steps"),
    ("step_seconds", "Seconds spent in engine steps.", "step_seconds"),
)
_GAUGES = (
    ("num_requests_running", "Requests that hold pages.", "num_running"),
    ("num_requests_waiting", "Requests not admitted yet, or preempted.", "num_waiting"),
)


class EngineCollector(Collector):
    """Reads the engine's statistics when Prometheus asks; counts nothing itself."""

    def __init__(self, client: EngineClient):
        self._client = client

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("octavo_engine_up", "1 while the engine can serve.")
        up.add_metric([], float(self._client.is_alive))
        yield up
        restarts = "Times that the engine was started again after it had died; its own counters then begin anew."
        yield CounterMetricFamily("octavo_engine_restarts", restarts, value=self._client.num_restarts)
        try:
            stats = self._client.stats()
        except EngineDeadError as problem:
            logger.debug("No statistics: %s", problem)
            return
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(f"octavo_{name}", text, value=getattr(stats, field))
        pages = GaugeMetricFamily("octavo_kv_pages", "Pages of the KV cache by state.", labels=["state"])
        pages.add_metric(["held"], stats.pages_held)
        pages.add_metric(["cached"], stats.pages_cached)
        pages.add_metric(["free"], stats.pages_free)
        yield pages
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(f"octavo_{name}", text, value=getattr(stats, field))


class Metrics:
    """A registry of its own, so that several apps fit in one process."""

    def __init__(self, client: EngineClient):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(client))
        ProcessCollector(registry=self.registry)
        self._first_token = Histogram(
            "octavo_time_to_first_token_seconds",
            "Seconds from the request's arrival to its first token.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._finished = Counter(
            "octavo_request_success",
            "Answers that ended, by reason; abort: the client left or the request was cancelled.",
            labelnames=["finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(reason)
        self._aborted = Counter(
            "octavo_requests_aborted",
            "Requests ended before their answers were complete, by reason.",
            labelnames=["reason"],
            registry=self.registry,
        )
        for reason in ("disconnect", "stall", "shutdown", "deadline", "error"):
            self._aborted.labels(reason)
        self._rejected = Counter(
            "octavo_requests_rejected",
            "HTTP requests answered with 503 before anything was done for them, by reason.",
            labelnames=["reason"],
            registry=self.registry,
        )
        for reason in ("queue_full", "queued_tokens", "engine_dead", "shutting_down"):
            self._rejected.labels(reason)

    def first_token(self, seconds: float) -> None:
        """A prompt's first token has come."""
        self._first_token.observe(seconds)

    def finished(self, reason: str, count: int = 1) -> None:
        """So many answers have ended for that reason."""
        self._finished.labels(reason).inc(count)

    def aborted(self, reason: str, count: int = 1) -> None:
        """So many requests were ended before their answers were complete."""
        self._aborted.labels(reason).inc(count)

    def rejected(self, reason: str) -> None:
        """A request was answered with 503 before anything was done for it."""
        self._rejected.labels(reason).inc()

    def show_admission(self, admission: Admission) -> None:
        """Show how full the service is."""
        for name, text, read in (
            (
                "octavo_num_requests_in_service",
                "Requests from their reservation to their end; max_num_seqs + max_num_queued_reqs at most.",
                lambda: admission.num_prompts,
            ),
            (
                "octavo_num_queued_tokens",
                "Prompt tokens of requests without a first token.",
                lambda: admission.num_queued_tokens,
            ),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The exposition and its content type, in the format that the scraper prefers."""
        encode, content_type = choose_encoder(accept or "")
        return encode(self.registry), content_type
