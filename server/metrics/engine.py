"""The engine's statistics as metrics: its counters, its gauges, and one observation per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine import EngineStats
from engine.process.client import EngineClient
from server.metrics.buckets import ITERATION_TOKENS, STEP

_COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests that were admitted to a step.", "prompt_tokens"),
    ("prompt_tokens_cached", "Prompt tokens of admitted requests that the prefix cache held.", "prompt_tokens_cached"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("computed_tokens", "Tokens that went through the model.", "computed_tokens"),
    ("num_preemptions", "Requests put back to waiting for lack of pages.", "num_preemptions"),
    ("oom_retries", "Steps that lacked memory and were computed in smaller parts.", "num_oom_retries"),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache, also when a request resumes.", "prefix_queries"),
    ("prefix_cache_hits", "Tokens found in the prefix cache, also when a request resumes.", "prefix_hits"),
    ("encoder_runs", "Encoder inputs that went through an encoder.", "num_encoder_runs"),
    ("encoder_hits", "Requests whose encoder input was encoded already, also when they resume.", "num_encoder_hits"),
    ("page_copies", "Pages copied because a sequence was about to write a shared one.", "num_page_copies"),
    ("steps", "Engine steps.", "num_steps"),
    (
        "spec_decode_num_draft_tokens",
        "Tokens that were drafted, those that a grammar forces included.",
        "num_draft_tokens",
    ),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "num_accepted_draft_tokens"),
    ("kv_disk_pages_written", "Pages of the KV cache written to kv_disk.", "disk_pages_written"),
    ("kv_disk_pages_read", "Pages of the KV cache read back from kv_disk.", "disk_pages_read"),
    ("kv_disk_pages_dropped", "Evicted pages that could not be written to kv_disk.", "disk_pages_dropped"),
    ("kv_disk_hits", "Requests that got pages of their prompt from kv_disk.", "disk_hits"),
    ("kv_disk_errors", "Damaged files in kv_disk, and reads and writes that failed.", "disk_errors"),
    ("kv_event_messages", "Messages about pages that are kept or dropped.", "num_kv_event_messages"),
    ("kv_event_drops", "Messages about pages that subscribers can get only by replay.", "num_kv_event_drops"),
)
_DRAFTS_AT = {
    "drafted_at": ("spec_decode_num_draft_tokens_per_pos", "Drafted tokens by their position in the drafts."),
    "accepted_at": ("spec_decode_num_accepted_tokens_per_pos", "Those of them that turned out right."),
}


class EngineMetrics(Collector):
    """Turns the engine's statistics into metrics.

    A restarted engine counts from zero. The counts of earlier engines are added, so that no counter decreases. While
    there is no engine, its gauges are absent. Zeros would look like an idle engine, and a router would send all
    requests there. `registry`: where the histograms are registered; the collector itself is not.
    """

    def __init__(self, client: EngineClient, registry: CollectorRegistry):
        self._client = client
        self._base = dict.fromkeys((field for _, _, field in _COUNTERS), 0)
        self._base_at: dict[str, list[int]] = {field: [] for field in _DRAFTS_AT}
        self._latest = client.stats() if client.is_alive else EngineStats()
        self._restarts = client.num_restarts
        # returns the number of inputs that wait here for their turn at the engine
        self.also_waiting: Callable[[], int] = lambda: 0
        # called with each step's tokens and the number of requests that wait for the next step
        self.stepped: Callable[[int, int], None] = lambda tokens, num_waiting: None
        self.step_seconds = Histogram(
            "octavo_step_seconds", "Seconds that an engine step took.", buckets=STEP, registry=registry
        )
        self.step_tokens = Histogram(
            "octavo_iteration_tokens_total",
            "Tokens that went through the model in one engine step.",
            buckets=ITERATION_TOKENS,
            registry=registry,
        )

    def follow(self, stats: EngineStats) -> None:
        """Process the engine's latest statistics; without it, `collect` has the counters but no steps."""
        previous = self._advance(stats)
        count = stats.num_steps - previous.num_steps
        if count > 0:
            self.stepped((stats.computed_tokens - previous.computed_tokens) // count, stats.num_waiting)
        for _ in range(count):  # one: there is one message per step
            self.step_seconds.observe((stats.step_seconds - previous.step_seconds) / count)
            self.step_tokens.observe((stats.computed_tokens - previous.computed_tokens) / count)

    def _advance(self, stats: EngineStats) -> EngineStats:
        if self._client.num_restarts != self._restarts:
            self._restarts = self._client.num_restarts
            for field in self._base:
                self._base[field] += getattr(self._latest, field)
            self._base_at = {field: self._at(field) for field in _DRAFTS_AT}
            self._latest = EngineStats()
        previous, self._latest = self._latest, stats
        return previous

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        client = self._client
        alive = client.is_alive
        yield GaugeMetricFamily("octavo_engine_up", "1 while the engine can serve.", value=float(alive))
        restarts = "Times that the engine was started again after it had died."
        yield CounterMetricFamily("octavo_engine_restarts", restarts, value=client.num_restarts)
        if alive:
            self._advance(client.stats())
        for name, text, field in _COUNTERS:
            value = self._base[field] + getattr(self._latest, field)
            yield CounterMetricFamily(f"octavo_{name}", text, value=value)
        yield from self._drafts()
        if alive:
            yield from self._gauges(self._latest)

    def _at(self, field: str) -> list[int]:
        """The counts of drafts by position, those of earlier engines included."""
        counts = zip_longest(self._base_at[field], getattr(self._latest, field), fillvalue=0)
        return [before + now for before, now in counts]

    def _drafts(self) -> Iterator[Metric]:
        drafts = "Times that tokens were drafted for a sequence."
        count = next(iter(self._at("drafted_at")), 0)
        yield CounterMetricFamily("octavo_spec_decode_num_drafts", drafts, value=count)
        for field, (name, text) in _DRAFTS_AT.items():
            family = CounterMetricFamily(f"octavo_{name}", text, labels=["position"])
            for position, value in enumerate(self._at(field) or [0]):
                family.add_metric([str(position)], value)
            yield family

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        text = "Requests that have been in a step and are not complete."
        yield GaugeMetricFamily("octavo_num_requests_running", text, value=stats.num_running)
        text = "Requests that have not been in a step, in the engine or on their way to it, and preempted ones."
        yield GaugeMetricFamily("octavo_num_requests_waiting", text, value=stats.num_waiting + self.also_waiting())
        pages = GaugeMetricFamily("octavo_kv_pages", "Pages of the KV cache by state.", labels=["state"])
        pages.add_metric(["held"], stats.pages_held)
        pages.add_metric(["cached"], stats.pages_cached)
        pages.add_metric(["free"], stats.pages_free)
        yield pages
        text = "Bytes that all pages in kv_disk take, those of other models included."
        yield GaugeMetricFamily("octavo_kv_disk_bytes", text, value=stats.disk_bytes)
        usage = (
            "Share of the KV cache's pages that requests hold, from 0 to 1; pages that are only cached count as free."
        )
        share = stats.pages_held / stats.pages_total if stats.pages_total else 0.0
        yield GaugeMetricFamily("octavo_kv_cache_usage_perc", usage, value=share)
