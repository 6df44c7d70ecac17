"""The figures of a closed load on the engine, as a table and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cli.terminal.style import print_table, styled
from engine.host.logs import printable

_PERCENTILES = (50, 90, 95, 99)
_HEAD = (
    "at a time", "requests", "failed", "requests/s", "output tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99",
    "e2e p50", "e2e p99",
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. Times are `time.perf_counter()` seconds."""

    prompt_tokens: int
    started: float
    ended: float = 0.0  # when it ended; 0 while it runs
    cached_tokens: int = 0
    times: list[float] = field(default_factory=list)  # when the steps that brought tokens ended
    counts: list[int] = field(default_factory=list)  # the number of tokens in each of these steps
    failure: tuple[str, str] | None = None  # the kind of error and its message

    @property
    def output_tokens(self) -> int:
        """The number of tokens received."""
        return sum(self.counts)

    def inter_token(self) -> list[float]:
        """Gaps between tokens; the tokens of one step divide the gap before it evenly."""
        gaps: list[float] = []
        for before, now, count in zip(self.times, self.times[1:], self.counts[1:], strict=False):
            gaps += [(now - before) / count] * count
        return gaps


@dataclass(frozen=True, slots=True)
class Level:
    """A load with a fixed number of requests at a time. `server`: the model, its path and its version."""

    records: Sequence[Record]
    settings: Mapping[str, Any]
    server: Mapping[str, Any]
    cpu_seconds: float

    def summary(self) -> dict[str, Any]:
        """The figures: latencies in milliseconds, of completed requests only."""
        completed = [record for record in self.records if record.failure is None]
        failures = [record.failure for record in self.records if record.failure is not None]
        errors = Counter(kind for kind, _ in failures if kind != "interrupted")
        ended = [record for record in self.records if record.ended]
        seconds = max(record.ended for record in ended) - min(record.started for record in ended) if ended else 0.0
        read = sum(record.prompt_tokens for record in completed)
        written = sum(record.output_tokens for record in completed)
        streams = [record for record in completed if record.times]
        latencies = {
            "ttft": [record.times[0] - record.started for record in streams],
            "itl": [gap for record in streams for gap in record.inter_token()],
            "tpot": [
                (record.times[-1] - record.times[0]) / (record.output_tokens - record.counts[0])
                for record in streams
                if record.output_tokens > record.counts[0]
            ],
            "e2e": [record.ended - record.started for record in completed],
        }
        return {
            "benchmark": "offline",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "server": dict(self.server),
            "machine": machine(),
            "cpu_seconds": round(self.cpu_seconds, 4),
            "settings": dict(self.settings),
            "duration_s": seconds,
            "requests": {
                "completed": len(completed),
                "failed": errors.total(),
                "interrupted": len(failures) - errors.total(),
                "errors": dict(errors.most_common()),
                "error_examples": {kind: text for kind, text in reversed(failures) if kind in errors},
            },
            "tokens": {
                "input": read, "cached": sum(record.cached_tokens for record in completed), "output": written
            },
            "throughput": {
                name: amount / seconds if seconds else 0.0
                for name, amount in (
                    ("requests_per_s", len(completed)),
                    ("output_tokens_per_s", written),
                    ("total_tokens_per_s", read + written),
                )
            },
            "latency_ms": {name: distribution(values) for name, values in latencies.items()},
        }  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """A row per request, with times in seconds since the first request began."""
        start = min((record.started for record in self.records), default=0.0)
        return [
            {
                "index": index,
                "started": record.started - start,
                "ended": record.ended - start if record.ended else None,
                "input_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "output_tokens": record.output_tokens,
                "event_times": [round(when - start, 6) for when in record.times],
                "event_tokens": record.counts,
                "error": record.failure and dict(zip(("kind", "message"), record.failure, strict=True)),
            }
            for index, record in enumerate(self.records)
        ]


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Count, mean, standard deviation and percentiles of the values (in seconds), in milliseconds; None if there are no
    values."""
    if not values:
        return None
    found = sorted(value * 1e3 for value in values)
    # Linear interpolation, numpy's default; quantiles needs two values.
    points = statistics.quantiles(found * max(1, 3 - len(found)), n=100, method="inclusive")
    return {
        "count": len(found),
        "mean": statistics.fmean(found),
        "std": statistics.pstdev(found),
        "min": found[0],
        **{f"p{percent}": points[percent - 1] for percent in _PERCENTILES},
        "max": found[-1],
    }


def machine() -> dict[str, Any]:
    """The machine that this process runs on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    system, python = platform.platform(), platform.python_version()
    return {"cpu": name, "cores": os.cpu_count(), "system": system, "python": python}


def show(server: Mapping[str, Any], summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print a row per level, and an example of each kind of error."""
    print(styled(printable(f"{server['model']}, {server['url']}"), "bold") + ", latencies in ms\n")
    rows = []
    for found in summaries:
        requests, speed, latencies = found["requests"], found["throughput"], found["latency_ms"]
        row = [str(found["settings"]["concurrency"]), str(requests["completed"]), str(requests["failed"])]
        row += [f"{speed['requests_per_s']:.2f}", f"{speed['output_tokens_per_s']:.1f}"]
        for name in ("ttft", "itl", "e2e"):
            row += ["-" if latencies[name] is None else f"{latencies[name][point]:.1f}" for point in ("p50", "p99")]
        rows.append(tuple(row))
    print_table(_HEAD, rows, numbers=True)
    for text in {text: None for found in summaries for text in found["requests"]["error_examples"].values()}:
        print(f"\nError: {printable(text)}")
