"""Prometheus metrics that only the server can measure: the outcomes and times of requests, in the process that answers
them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.registry import Collector

from engine import EngineInfo, RequestDelta
from server.metrics.buckets import DURATION, EVENT_LOOP_LAG, FIRST_TOKEN, PER_TOKEN, token_counts
from server.metrics.times import PromptTimes

_REASONS = ("stop", "length", "abort", "error")
_ABORTS = ("disconnect", "stall", "shutdown", "deadline", "error", "cancel")
_REJECTIONS = (
    "queue_full", "queue_time", "queued_tokens", "deadline", "engine_dead", "shutting_down", "connections", "memory",
    "key_rate", "key_concurrency",
)  # fmt: skip
_DROPS = ("idle", "reserve")


class RequestMetrics:
    """Counters and histograms. They are used from one event loop. `info`: facts about the engine."""

    def __init__(self, info: EngineInfo, registry: CollectorRegistry):
        self._watched: dict[str, PromptTimes] = {}

        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"octavo_{name}", about, buckets=buckets, registry=registry)

        def counter(name: str, about: str, label: str, values: Sequence[str] = ()) -> Counter:
            """A counter with one label. All its values exist from the start, so the first occurrence is an increase."""
            made = Counter(f"octavo_{name}", about, labelnames=[label], registry=registry)
            for value in values:
                made.labels(value)
            return made

        counts = token_counts(info.max_model_len)
        self._first_token = histogram(
            "time_to_first_token_seconds", "Seconds from a prompt's arrival to its first token.", FIRST_TOKEN
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds",
            "Seconds between two steps that brought tokens of the same answer.",
            PER_TOKEN,
        )
        self._per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds per token after the first, one value per prompt.",
            PER_TOKEN,
        )
        self._total = histogram(
            "e2e_request_latency_seconds", "Seconds from a prompt's arrival to the end of its last answer.", DURATION
        )
        self._queue = histogram(
            "request_queue_time_seconds",
            "Seconds from a prompt's arrival to its first step, including tokenising.",
            DURATION,
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "Seconds from a prompt's first step to its first token.", DURATION
        )
        self._decode = histogram(
            "request_decode_time_seconds", "Seconds from a prompt's first token to its last.", DURATION
        )
        self._prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt.", counts)
        self._generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated for a prompt, in all its answers.", counts
        )
        self.event_loop_lag = histogram(
            "event_loop_lag_seconds",
            "Seconds by which the server's event loop was late, measured four times a second.",
            EVENT_LOOP_LAG,
        )
        self._finished = counter(
            "request_success",
            "Answers that ended, by reason; abort: the client left or the request was cancelled.",
            "finished_reason",
        )
        self._by_reason = {reason: self._finished.labels(reason) for reason in _REASONS}
        self._aborted = counter(
            "requests_aborted",
            "Requests that were ended before their answers were complete, by reason.",
            "reason",
            _ABORTS,
        )
        self._rejected = counter(
            "requests_rejected",
            "HTTP requests answered with 503 or 429 before anything was done for them, by reason.",
            "reason",
            _REJECTIONS,
        )
        self._adapters = counter(
            "lora_requests", "Requests that were admitted for an adapter, by its name.", "lora_name"
        )
        self._dropped = counter(
            "connections_dropped",
            "Connections closed to make room for others: idle ones between requests, and those beyond "
            "max_connections that sent no request.",
            "kind",
            _DROPS,
        )
        self._store_failures = Counter(
            "octavo_response_store_failures",
            "Times that the response store could not store, find or delete an answer.",
            registry=registry,
        )

    @property
    def collectors(self) -> tuple[Collector, ...]:
        """The metrics that vLLM also has."""
        return (
            self._first_token, self._inter_token, self._per_output_token, self._total, self._queue, self._prefill,
            self._decode, self._prompt_tokens, self._generation_tokens, self._finished,
        )  # fmt: skip

    # ---------------------------------------------------------------- one prompt

    def watch(self, request_id: str, times: PromptTimes) -> None:
        """Fill `times` from the engine's updates about this request, until `unwatch`."""
        self._watched[request_id] = times

    def unwatch(self, request_id: str) -> None:
        self._watched.pop(request_id, None)

    def note(self, deltas: Sequence[RequestDelta]) -> None:
        """Record an update of the engine."""
        now = time.monotonic()
        for delta in deltas:
            times = self._watched.get(delta.request_id)
            if times is not None:
                self._note(times, delta, now)

    def _note(self, times: PromptTimes, delta: RequestDelta, now: float) -> None:
        """The work per token: a few microseconds."""
        if times.sampled is None:
            times.note(delta)
        for choice in delta.choices:
            if not choice.token_ids or times.reasons[choice.index] is not None:
                continue  # nothing new, or after the stop string that ended the answer here
            last = times.latest[choice.index]
            if last >= 0.0:
                self._inter_token.observe(now - last)
            elif times.first_token is None:
                times.first_token = now
                self._first_token.observe(max(0.0, now - times.arrival))
            times.latest[choice.index] = times.last_token = now

    def prompt_done(self, times: PromptTimes) -> None:
        """All answers to a prompt are complete. Incomplete answers would reflect the client's behaviour."""
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
        """Record an input whose vector, classes or masked tokens are ready."""
        self.finished("stop")  # as vLLM counts them
        self._total.observe(max(0.0, time.monotonic() - times.arrival))
        for histogram, seconds in ((self._queue, times.queue_seconds), (self._prefill, times.prefill_seconds)):
            if seconds is not None:
                histogram.observe(seconds)
        self._prompt_tokens.observe(times.num_prompt)

    # ---------------------------------------------------------------- the ends of requests

    def finished(self, reason: str, count: int = 1) -> None:
        """Count answers that have ended for that reason."""
        self._by_reason[reason].inc(count)

    def admitted(self, adapter: str | None) -> None:
        """A request was admitted, for an adapter or for the base model."""
        if adapter is not None:
            self._adapters.labels(adapter).inc()

    def aborted(self, reason: str, count: int = 1) -> None:
        """Count requests that ended before their answers were complete."""
        self._aborted.labels(reason).inc(count)

    def rejected(self, reason: str) -> None:
        """A request was answered with 503 or 429 before any work was done for it."""
        self._rejected.labels(reason).inc()

    def store_failed(self) -> None:
        """An operation of the store of responses failed."""
        self._store_failures.inc()

    def connection_dropped(self, kind: str) -> None:
        """A connection was closed to make room for another one."""
        self._dropped.labels(kind).inc()
