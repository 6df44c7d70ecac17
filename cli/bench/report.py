"""A run's figures as a table and as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cli.bench.measure import OVERLOADED, PERCENTILES, Distribution, Summary, time_per_token, time_to_first
from cli.bench.record import Record
from engine.host.logs import printable

_LATENCIES = (
    ("ttft", "time to first token"),
    ("itl", "inter-token latency"),
    ("tpot", "time per output token"),
    ("e2e", "end-to-end latency"),
    ("lag", "sent later than due"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The settings of a run.

    Attributes:
        server: url, model, version and max_model_len; None for what is not known.
        client_cpu_seconds: that this process took during the run.
        loop: the event loop's kind.
        notes: what a reader must know.
        benchmark: "serve" or "offline".
    """

    settings: Mapping[str, Any]
    server: Mapping[str, Any]
    client_cpu_seconds: float
    loop: str
    notes: list[str] = field(default_factory=list)
    benchmark: str = "serve"

    @property
    def title(self) -> str:
        """Model and place in a line; names and messages are the server's: they must not command the terminal."""
        joint = " at " if self.benchmark == "serve" else ", "
        return printable(f"{self.server['model']}{joint}{self.server['url']}")


@dataclass(frozen=True, slots=True)
class Run:
    """One load. `level` says how many requests ran at a time; None: the load was open, or has no levels."""

    level: int | None
    records: list[Record]
    facts: Facts


def machine() -> dict[str, Any]:
    """The machine that this process runs on."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def notes(summary: Summary, facts: Facts) -> list[str]:
    """Notes for readers of the figures."""
    found = list(facts.notes)
    if summary.tokens_counted_by == "events" and summary.completed:
        found.append("The server does not report usage: output tokens are estimated as one per event.")
    if not summary.itl_by_token and (summary.tokens_per_event or 1.0) > 1.01:  # else it makes no difference
        found.append(
            f"Events hold {summary.tokens_per_event:.2f} tokens on average, but the server does not report how many "
            f"each "
            "holds: inter-token latency is per event (see --return-token-ids)."
        )
    if facts.benchmark == "serve" and summary.seconds > 1 and facts.client_cpu_seconds > 0.8 * summary.seconds:
        found.append(
            f"The load generator was busy for {facts.client_cpu_seconds / summary.seconds:.0%} of the time, "
            "so it may have caused part of the latency. Spread the load over several generators."
        )
    return found


def table(summary: Summary, facts: Facts) -> str:
    """The report as a table, for people."""
    server = facts.server
    title = facts.title + (f", version {server['version']}" if server["version"] else "")
    lines = [printable(title), ""]
    failed = f"{summary.completed} completed, {summary.failed} failed"
    if summary.interrupted:
        failed += f", {summary.interrupted} interrupted"
    rows = [("requests", failed)]
    for kind, count in summary.errors.items():
        label = f"  {kind}" + (" (overloaded)" if kind == OVERLOADED else "")
        rows.append((label, f"{count}: {printable(summary.examples[kind])}"))
    counted = "" if summary.cached_tokens is None else f" ({summary.cached_tokens} from the prefix cache)"
    rows += [
        ("duration", f"{summary.seconds:.2f} s"),
        ("input tokens", f"{summary.input_tokens}{counted}"),
        ("output tokens", f"{summary.output_tokens}"),
        ("request throughput", f"{summary.request_throughput:.2f} requests/s"),
        ("output throughput", f"{summary.output_throughput:.1f} tokens/s"),
        ("total throughput", f"{summary.total_throughput:.1f} tokens/s"),
    ]
    if summary.good is not None:
        rows.append(("goodput", f"{summary.goodput:.2f} requests/s ({summary.good} of {summary.completed})"))
    tokens = summary.output_tokens
    each = f", {facts.client_cpu_seconds / tokens * 1e6:.0f} us per output token" if tokens else ""
    label = "load generator" if facts.benchmark == "serve" else "this process"
    rows.append((label, f"{facts.client_cpu_seconds:.2f} s of CPU{each}"))
    lines += [f"{label:24}{value}" for label, value in rows]
    heads = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    lines += ["", f"{'latency in ms':24}" + "".join(f"{head:>11}" for head in heads)]
    for name, label in _LATENCIES:
        found: Distribution | None = getattr(summary, name)
        if found is None:
            lines.append(f"{label:24}" + f"{'-':>11}" * len(heads))
        else:
            values = (found.mean, *found.percentiles, found.highest)
            lines.append(f"{label:24}" + "".join(f"{value * 1e3:11.2f}" for value in values))
    lines += [f"\nNote: {note}" for note in notes(summary, facts)]
    return "\n".join(lines)


def document(summary: Summary, facts: Facts, records: Sequence[Record] | None = None) -> dict[str, Any]:
    """The report as JSON, for programs: latencies in milliseconds. With `records`, it has a row per request, whose
    times are seconds after the first request was due."""
    result: dict[str, Any] = {
        "benchmark": facts.benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "server": dict(facts.server),
        "machine": machine(),
        "client": {"cpu_seconds": round(facts.client_cpu_seconds, 4), "event_loop": facts.loop},
        "settings": dict(facts.settings),
        "notes": notes(summary, facts),
        "duration_s": summary.seconds,
        "requests": {
            "completed": summary.completed,
            "failed": summary.failed,
            "interrupted": summary.interrupted,
            "overloaded_503": summary.errors.get(OVERLOADED, 0),
            "errors": summary.errors,
            "error_examples": summary.examples,
        },
        "tokens": {
            "input": summary.input_tokens,
            "cached": summary.cached_tokens,
            "output": summary.output_tokens,
            "output_counted_by": summary.tokens_counted_by,
            "per_event": summary.tokens_per_event,
        },
        "throughput": {
            "requests_per_s": summary.request_throughput,
            "output_tokens_per_s": summary.output_throughput,
            "total_tokens_per_s": summary.total_throughput,
        },
        "goodput": None if summary.good is None else {"requests": summary.good, "requests_per_s": summary.goodput},
        "latency_ms": {name: _milliseconds(getattr(summary, name)) for name, _ in _LATENCIES},
        "itl_counted_by": "token" if summary.itl_by_token else "event",
    }
    if records is not None:
        start = min((record.scheduled for record in records), default=0.0)
        result["rows"] = [_row(record, start) for record in records]
    return result


def _milliseconds(found: Distribution | None) -> dict[str, float | int] | None:
    if found is None:
        return None
    points = {f"p{percent}": value * 1e3 for percent, value in zip(PERCENTILES, found.percentiles, strict=True)}
    return {
        "count": found.count,
        "mean": found.mean * 1e3,
        "std": found.std * 1e3,
        "min": found.lowest * 1e3,
        **points,
        "max": found.highest * 1e3,
    }


def _row(record: Record, start: float) -> dict[str, Any]:
    ttft, tpot = time_to_first(record), time_per_token(record)
    return {
        "index": record.index,
        "scheduled": record.scheduled - start,
        "sent": record.sent - start if record.sent else None,
        "ended": record.ended - start,
        "ttft_ms": None if ttft is None else ttft * 1e3,
        "tpot_ms": None if tpot is None else tpot * 1e3,
        "e2e_ms": (record.ended - record.scheduled) * 1e3,
        "wanted_input_tokens": record.input_len,
        "wanted_output_tokens": record.output_len,
        "input_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "finish_reason": record.finish_reason,
        "event_times": [round(when - start, 6) for when in record.times],
        "event_tokens": [None if count < 0 else count for count in record.counts],
        "error": None if record.failure is None else {"kind": record.failure.kind, "message": record.failure.message},
    }
