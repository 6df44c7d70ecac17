"""Records to figures. All latencies are in seconds here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cli.bench.record import Record

PERCENTILES = (50, 90, 95, 99)
OVERLOADED = "http 503"


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile, with linear interpolation between the two nearest values, as numpy's default. `ordered` ascends
    and is not empty."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of one latency, in seconds; `percentiles` in the order of `PERCENTILES`."""

    count: int
    mean: float
    std: float
    lowest: float
    highest: float
    percentiles: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """The distribution of these values; None if there are none."""
        if not values:
            return None
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
        points = tuple(percentile(ordered, percent) for percent in PERCENTILES)
        return cls(len(ordered), mean, std, ordered[0], ordered[-1], points)


@dataclass(frozen=True, slots=True)
class Goals:
    """The limits that a request must keep to count for the goodput, in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run's figures.

    Attributes:
        seconds: from the first request's due time to the last answer's end.
        completed, failed, interrupted: requests.
        errors: failed ones by kind; `OVERLOADED` is the server's refusal to take more.
        examples: one message per kind.
        cached_tokens: None if the server does not say.
        tokens_counted_by: "server", or "events" where it does not count.
        tokens_per_event: 1 where no tokens came together; None without streams.
        itl_by_token: inter-token latencies are per token; else per event, whose tokens are not known.
        lag: seconds by which requests were sent later than they were due.
        good: completed requests that kept the goals; None without goals.
    """

    seconds: float
    completed: int
    failed: int
    interrupted: int
    errors: dict[str, int]
    examples: dict[str, str]
    input_tokens: int
    cached_tokens: int | None
    output_tokens: int
    tokens_counted_by: str
    tokens_per_event: float | None
    itl_by_token: bool
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    lag: Distribution | None
    good: int | None

    @property
    def request_throughput(self) -> float:
        """Completed requests per second."""
        return self.completed / self.seconds if self.seconds else 0.0

    @property
    def output_throughput(self) -> float:
        """Output tokens of completed requests per second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def total_throughput(self) -> float:
        """Input and output tokens of completed requests per second."""
        return (self.input_tokens + self.output_tokens) / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float | None:
        """Completed requests per second that kept the goals."""
        return None if self.good is None else (self.good / self.seconds if self.seconds else 0.0)


def time_to_first(record: Record) -> float | None:
    """Seconds from when it was due; None if it did not stream."""
    return None if record.first is None else record.first - record.scheduled


def time_per_token(record: Record) -> float | None:
    """Seconds per output token after those of the first event; None where there are none."""
    if len(record.times) < 2:
        return None
    tokens = record.output_tokens - max(1, record.counts[0])
    return (record.times[-1] - record.times[0]) / tokens if tokens > 0 else None


def inter_token(record: Record) -> list[float]:
    """Gaps between tokens. Tokens of one event share the gap before it evenly; where their number is unknown
    the event counts as one."""
    gaps: list[float] = []
    for before, now, count in zip(record.times, record.times[1:], record.counts[1:], strict=False):
        tokens = max(1, count)
        gaps += [(now - before) / tokens] * tokens
    return gaps


def summarise(records: Sequence[Record], goals: Goals | None = None) -> Summary:
    """The figures of a run. Requests that failed count as errors only; interrupted ones not even that."""
    completed = [record for record in records if record.failure is None]
    failures = [record.failure for record in records if record.failure is not None]
    errors = Counter(failure.kind for failure in failures if failure.kind != "interrupted")
    ended = [record for record in records if record.failure is None or record.failure.kind != "interrupted"]
    seconds = max(record.ended for record in ended) - min(record.scheduled for record in ended) if ended else 0.0
    streamed = [record for record in completed if record.times]
    cached = [record.cached_tokens for record in completed if record.cached_tokens is not None]
    events = sum(len(record.times) for record in streamed)
    return Summary(
        seconds=seconds,
        completed=len(completed),
        failed=errors.total(),
        interrupted=len(failures) - errors.total(),
        errors=dict(errors.most_common()),
        examples={failure.kind: failure.message for failure in reversed(failures) if failure.kind in errors},
        input_tokens=sum(
            record.prompt_tokens if record.prompt_tokens is not None else record.input_len or 0 for record in completed
        ),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(record.output_tokens for record in completed),
        tokens_counted_by="server" if all(record.completion_tokens is not None for record in completed) else "events",
        tokens_per_event=sum(record.output_tokens for record in streamed) / events if events else None,
        itl_by_token=all(record.counts_known for record in streamed),
        ttft=Distribution.of([value for record in completed if (value := time_to_first(record)) is not None]),
        itl=Distribution.of([gap for record in streamed for gap in inter_token(record)]),
        tpot=Distribution.of([value for record in completed if (value := time_per_token(record)) is not None]),
        e2e=Distribution.of([record.ended - record.scheduled for record in completed]),
        lag=Distribution.of([record.sent - record.scheduled for record in records if record.sent]),
        good=None if goals is None else sum(keeps(record, goals) for record in completed),
    )


def keeps(record: Record, goals: Goals) -> bool:
    """The request kept the goals; one whose latency is not known did not keep a goal for it, except that an
    answer of one token has no time per token to exceed."""
    ttft, tpot = time_to_first(record), time_per_token(record)
    first = goals.ttft is None or (ttft is not None and ttft <= goals.ttft)
    rest = goals.tpot is None or (record.times and tpot is None) or (tpot is not None and tpot <= goals.tpot)
    return bool(first and rest)
