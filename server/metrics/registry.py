"""Prometheus metrics of one app: what the engine reports, and what only the server sees.

Names are vLLM's under Octavo's prefix, without labels where one number says it all: a service has one model, and
octavo_model_info tells its name. Under vLLM's own prefix the same numbers carry its labels (`server.metrics.vllm`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from engine import EngineStats, RequestDelta
from engine.process.client import EngineClient
from server.admission import Admission
from server.metrics.buckets import DURATION, EVENT_LOOP_LAG, FIRST_TOKEN, PER_TOKEN, token_counts
from server.metrics.engine import EngineMetrics
from server.metrics.info import InfoMetrics
from server.metrics.times import PromptTimes
from server.metrics.vllm import VllmAliases

_REASONS = ("stop", "length", "abort", "error")
# Known from the start, so that a first occurrence is an increase.
_ABORTS = ("disconnect", "stall", "shutdown", "deadline", "error", "cancel")
_REJECTIONS = (
    "queue_full", "queue_time", "queued_tokens", "deadline", "engine_dead", "shutting_down", "connections", "memory",
    "key_rate", "key_concurrency",
)  # fmt: skip
_DROPS = ("idle", "reserve")


class Metrics:
    """A registry of its own, so that several apps fit in one process. One event loop uses it.

    Args:
        client: its news are listened to from now on.
        model_name: the model's name to clients.
        version: Octavo's.
    """

    def __init__(self, client: EngineClient, model_name: str = "", version: str = "0"):
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._watched: dict[str, PromptTimes] = {}
        histogram = partial(Histogram, registry=self.registry)
        counts = token_counts(client.info.max_model_len)
        self._first_token = histogram(
            "octavo_time_to_first_token_seconds",
            "Seconds from a prompt's arrival to its first token.",
            buckets=FIRST_TOKEN,
        )
        self._inter_token = histogram(
            "octavo_inter_token_latency_seconds",
            "Seconds between two steps that brought tokens of the same answer.",
            buckets=PER_TOKEN,
        )
        self._per_output_token = histogram(
            "octavo_request_time_per_output_token_seconds",
            "Mean seconds per token after the first, one value per prompt.",
            buckets=PER_TOKEN,
        )
        self._total = histogram(
            "octavo_e2e_request_latency_seconds",
            "Seconds from a prompt's arrival to the end of its last answer.",
            buckets=DURATION,
        )
        self._queue = histogram(
            "octavo_request_queue_time_seconds",
            "Seconds from a prompt's arrival to its first step, tokenising included.",
            buckets=DURATION,
        )
        self._prefill = histogram(
            "octavo_request_prefill_time_seconds",
            "Seconds from a prompt's first step to its first token.",
            buckets=DURATION,
        )
        self._decode = histogram(
            "octavo_request_decode_time_seconds",
            "Seconds from a prompt's first token to its last.",
            buckets=DURATION,
        )
        self._prompt_tokens = histogram("octavo_request_prompt_tokens", "Tokens of a prompt.", buckets=counts)
        self._generation_tokens = histogram(
            "octavo_request_generation_tokens", "Tokens generated for a prompt, in all its answers.", buckets=counts
        )
        self.event_loop_lag = histogram(
            "octavo_event_loop_lag_seconds",
            "Seconds by which the server's event loop was late, looked at four times a second.",
            buckets=EVENT_LOOP_LAG,
        )
        self._finished = Counter(
            "octavo_request_success",
            "Answers that ended, by reason; abort: the client left or the request was cancelled.",
            labelnames=["finished_reason"],
            registry=self.registry,
        )
        self._by_reason = {reason: self._finished.labels(reason) for reason in _REASONS}
        self._aborted = Counter(
            "octavo_requests_aborted",
            "Requests that were ended before their answers were complete, by reason.",
            labelnames=["reason"],
            registry=self.registry,
        )
        for reason in _ABORTS:
            self._aborted.labels(reason)
        self._rejected = Counter(
            "octavo_requests_rejected",
            "HTTP requests answered with 503 or 429 before anything was done for them, by reason.",
            labelnames=["reason"],
            registry=self.registry,
        )
        for reason in _REJECTIONS:
            self._rejected.labels(reason)
        self._dropped = Counter(
            "octavo_connections_dropped",
            "Connections closed for others: idle ones between requests, and those beyond max_connections that asked "
            "for nothing.",
            labelnames=["kind"],
            registry=self.registry,
        )
        for kind in _DROPS:
            self._dropped.labels(kind)
        self._store_failures = Counter(
            "octavo_response_store_failures",
            "Times that the store of responses could not keep, find or delete an answer.",
            registry=self.registry,
        )
        self.engine = EngineMetrics(client, self.registry)
        info = InfoMetrics(client, model_name, version)
        shared = (
            self.engine, info, self._first_token, self._inter_token, self._per_output_token, self._total, self._queue,
            self._prefill, self._decode, self._prompt_tokens, self._generation_tokens, self._finished,
            self.engine.step_tokens,
        )  # fmt: skip
        for collector in (self.engine, info, VllmAliases(shared, model_name)):
            self.registry.register(collector)
        client.on_news = self._on_news

    # ---------------------------------------------------------------- one prompt

    def watch(self, request_id: str, times: PromptTimes) -> None:
        """Fill `times` from the engine's news about this request, until `unwatch`."""
        self._watched[request_id] = times

    def unwatch(self, request_id: str) -> None:
        """The request is over."""
        self._watched.pop(request_id, None)

    def _on_news(self, deltas: Sequence[RequestDelta], stats: EngineStats) -> None:
        self.engine.follow(stats)
        now = time.monotonic()
        for delta in deltas:
            times = self._watched.get(delta.request_id)
            if times is not None:
                self._note(times, delta, now)

    def _note(self, times: PromptTimes, delta: RequestDelta, now: float) -> None:
        """All that is done per token: a few microseconds."""
        if times.sampled is None:
            times.note(delta)
        for choice in delta.choices:
            if not choice.token_ids or times.reasons[choice.index] is not None:
                continue  # nothing new, or after the stop string that ended it here
            last = times.latest[choice.index]
            if last >= 0.0:
                self._inter_token.observe(now - last)
            elif times.first_token is None:
                times.first_token = now
                self._first_token.observe(max(0.0, now - times.arrival))
            times.latest[choice.index] = times.last_token = now

    def prompt_done(self, times: PromptTimes) -> None:
        """All answers to a prompt are complete: those that were cut short would tell of the client."""
        if any(reason not in ("stop", "length") for reason in times.reasons):
            return
        self._total.observe(max(0.0, time.monotonic() - times.arrival))
        for histogram, seconds in (
            (self._queue, times.queue_seconds),
            (self._prefill, times.prefill_seconds),
            (self._decode, times.decode_seconds),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        longest = max(times.generated)
        if times.decode_seconds is not None and longest > 1:
            self._per_output_token.observe(times.decode_seconds / (longest - 1))
        self._prompt_tokens.observe(times.num_prompt)
        self._generation_tokens.observe(sum(times.generated))

    def input_done(self, times: PromptTimes) -> None:
        """An input has its vector, its classes or its masked tokens."""
        self.finished("stop")  # as vLLM counts them
        self._total.observe(max(0.0, time.monotonic() - times.arrival))
        for histogram, seconds in ((self._queue, times.queue_seconds), (self._prefill, times.prefill_seconds)):
            if seconds is not None:
                histogram.observe(seconds)
        self._prompt_tokens.observe(times.num_prompt)

    # ---------------------------------------------------------------- how requests end

    def finished(self, reason: str, count: int = 1) -> None:
        """So many answers have ended for that reason."""
        self._by_reason[reason].inc(count)

    def aborted(self, reason: str, count: int = 1) -> None:
        """So many requests were ended before their answers were complete."""
        self._aborted.labels(reason).inc(count)

    def rejected(self, reason: str) -> None:
        """A request was answered with 503 or 429 before anything was done for it."""
        self._rejected.labels(reason).inc()

    def store_failed(self) -> None:
        """The store of responses could not do what it was asked."""
        self._store_failures.inc()

    def connection_dropped(self, kind: str) -> None:
        """A connection was closed for another one."""
        self._dropped.labels(kind).inc()

    def show_connections(self, count: Callable[[], int]) -> None:
        """Show how many connections there are."""
        gauge = Gauge("octavo_connections", "Connections of clients, the reserve included.", registry=self.registry)
        gauge.set_function(count)

    def show_admission(self, *admissions: Admission) -> None:
        """Show how full the service is, by all of these together."""
        for name, text, read in (
            (
                "octavo_num_requests_in_service",
                "Requests from their reservation to their end; max_num_seqs + max_num_queued_reqs prompts at most, and "
                "as many requests for vectors, classes or masked tokens, which count as one each.",
                lambda: sum(admission.num_prompts for admission in admissions),
            ),
            (
                "octavo_num_queued_tokens",
                "Prompt tokens of requests without a first token, and of inputs without an answer.",
                lambda: sum(admission.num_queued_tokens for admission in admissions),
            ),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)

    # ---------------------------------------------------------------- the exposition

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics 1.0 where the scraper lists it before plain text."""
        for listed in (accept or "").split(","):
            kind, *parameters = (part.strip() for part in listed.split(";"))
            version = next((part.removeprefix("version=") for part in parameters if part.startswith("version=")), "")
            if kind == "application/openmetrics-text" and version in ("", "1.0.0"):
                # Every name here is a classic one: no scheme of escaping changes it. The library's own choice
                # of an encoder would write vllm_ for vllm: where the scraper names no scheme.
                encode: Callable[..., bytes] = openmetrics.generate_latest
                return encode(self.registry, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
            if kind == "text/plain":
                break
        return generate_latest(self.registry, escaping=openmetrics.ALLOWUTF8), CONTENT_TYPE_PLAIN_0_0_4
