"""Checks after the load: counters agree, nothing has leaked, each request ended once."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soaking.ledger import FATES, Ledger

Metrics = Mapping[str, float]

_EMPTY = ("octavo_num_requests_running", "octavo_num_requests_waiting", "octavo_num_requests_in_service",
          "octavo_num_queued_tokens", 'octavo_kv_pages{state="held"}')  # fmt: skip
_OUTCOMES = {
    "complete": {"ok"},
    "refused": {"refused"},
    "dead": {"refused", "error"},
    "cut": {"error"},
    "left": {"ok", "aborted:disconnect", "error", "refused"},
    # ok: all that was left had gone to the connection's buffer; error: so had the word that the engine was dead.
    "stalled": {"aborted:stall", "ok", "error"},
}
_POINTS = 240  # of a slope


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How far a process may be from where it was after the warm-up.

    Attributes:
        memory_mib: resident memory, at rest.
        slope_mib_per_hour: its growth under load, judged where a process was watched for `slope_seconds`.
        slope_settle_seconds: of a process's life before it is watched: caches fill.
        descriptors: open ones, at rest.
        threads: at rest; pools fill up to their size.
    """

    memory_mib: float = 32.0
    slope_mib_per_hour: float = 32.0
    slope_seconds: float = 600.0
    slope_settle_seconds: float = 120.0
    descriptors: int = 4
    threads: int = 8


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory, threads and files of a process."""

    rss_mib: float
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident memory of a process at a time."""

    seconds: float
    pid: int
    rss_mib: float


def check_empty(metrics: Metrics) -> list[str]:
    """Nothing runs, waits or holds pages."""
    return [f"{name} is {metrics.get(name, float('nan')):g} at rest" for name in _EMPTY if metrics.get(name) != 0]


def num_pages(metrics: Metrics) -> float:
    """All pages of the cache."""
    return sum(metrics[f'octavo_kv_pages{{state="{state}"}}'] for state in ("held", "cached", "free"))


def check_usage(name: str, before: Usage, after: Usage, limits: Tolerances) -> list[str]:
    """A process at rest holds what it held after the warm-up."""
    found = []
    for what, allowed in (
        ("rss_mib", limits.memory_mib),
        ("descriptors", limits.descriptors),
        ("threads", limits.threads),
    ):
        one, two = getattr(before, what), getattr(after, what)
        if two > one + allowed:
            found.append(f"{name}: {what} went from {one:g} to {two:g}, more than {allowed:g} above")
    return found


def slope(samples: Sequence[Sample], limits: Tolerances) -> float | None:
    """MiB an hour: the median of the slopes between all pairs of samples of the same process (Theil and Sen); None if
    no process was watched for long enough."""
    by_pid: dict[int, list[Sample]] = {}
    for sample in samples:
        by_pid.setdefault(sample.pid, []).append(sample)
    slopes: list[float] = []
    for lived in by_pid.values():
        settled = [one for one in lived if one.seconds >= lived[0].seconds + limits.slope_settle_seconds]
        if not settled or settled[-1].seconds - settled[0].seconds < limits.slope_seconds:
            continue
        few = settled[:: max(1, len(settled) // _POINTS)]
        slopes += [
            (two.rss_mib - one.rss_mib) / (two.seconds - one.seconds) * 3600
            for place, one in enumerate(few)
            for two in few[place + 1 :]
            if two.seconds > one.seconds
        ]
    return statistics.median(slopes) if slopes else None


def check_slope(name: str, samples: Sequence[Sample], limits: Tolerances) -> list[str]:
    """Memory does not grow under load."""
    found = slope(samples, limits)
    if found is None or found <= limits.slope_mib_per_hour:
        return []
    return [f"{name}: memory grew by {found:.1f} MiB an hour, more than {limits.slope_mib_per_hour:g}"]


def check_counters(before: Metrics, after: Metrics, ledger: Ledger, *, kills: int) -> list[str]:
    """The server has counted what the clients have seen."""
    grown = {name: after[name] - before.get(name, 0.0) for name in after if name.endswith(("_total", "}"))}
    found = []

    def expect(name: str, least: float, most: float | None = None) -> None:
        most = least if most is None else most
        if not least <= grown[name] <= most:
            wanted = f"{least:g}" if least == most else f"{least:g} to {most:g}"
            found.append(f"{name} grew by {grown[name]:g}; the clients saw {wanted}")

    def answers(reason: str) -> str:
        return f'octavo_request_success_total{{finished_reason="{reason}"}}'

    fates, unsure = ledger.fates, ledger.begun + ledger.open
    for reason in ("stop", "length"):
        expect(answers(reason), ledger.ended[reason], ledger.ended[reason] + unsure)
    for reason in ("abort", "error"):
        expect(answers(reason), ledger.ended[reason], ledger.ended[reason] + unsure)
    total = sum(grown[answers(reason)] for reason in ("stop", "length", "abort", "error"))
    least = sum(ledger.ended.values()) + ledger.begun
    if not least <= total <= least + ledger.open:
        found.append(f"{total:g} answers were counted; the clients know of {least} to {least + ledger.open}")
    full = ("queue_full", "queue_time", "queued_tokens")
    refused = sum(grown[f'octavo_requests_rejected_total{{reason="{why}"}}'] for why in full)
    known = fates["refused"] + ledger.bad_away["overloaded"]
    if not known <= refused <= known + ledger.unheard:
        found.append(f"{refused:g} requests were refused as too many; the clients saw {known}")
    expect(
        'octavo_requests_rejected_total{reason="engine_dead"}',
        0,
        fates["dead"] + ledger.bad_away["engine_dead"] + ledger.unheard,
    )
    expect('octavo_requests_rejected_total{reason="shutting_down"}', 0)
    expect('octavo_requests_aborted_total{reason="disconnect"}', 0, ledger.prompts_left)
    expect('octavo_requests_aborted_total{reason="deadline"}', 0)
    expect('octavo_requests_aborted_total{reason="shutdown"}', 0)
    expect("octavo_engine_restarts_total", kills)
    return found


def check_log(lines: Iterable[Mapping[str, Any]], ledger: Ledger) -> list[str]:
    """The server's log has one end for each request, and it is the one that the client saw; and no surprises.

    Args:
        lines: the log's records.
    """
    ends: dict[str, list[str]] = {}
    found: list[str] = []
    surprises: Counter[str] = Counter()
    for line in lines:
        if line.get("logger") == "octavo.request":
            if (request_id := line.get("request_id")) in ledger.by_id:
                ends.setdefault(str(request_id), []).append(str(line.get("outcome")))
        elif line.get("level") in ("error", "critical") or "exception" in line:
            surprises[str(line.get("event"))] += 1
    for request_id, (fate, accepted) in ledger.by_id.items():
        seen = ends.get(request_id, [])
        if len(seen) > 1:
            found.append(f"request {request_id} ended {len(seen)} times: {seen}")
        # What is refused at the door while the service is full shares a line.
        elif not seen and (accepted or fate in ("complete", "cut", "stalled")):
            found.append(f"request {request_id} ({fate}) never ended in the log")
        elif seen and fate in _OUTCOMES and seen[0] not in _OUTCOMES[fate]:
            found.append(f"request {request_id} was {fate} to the client, and {seen[0]} to the server")
    for event, count in surprises.items():
        if not event.startswith("The engine crashed: the engine's process was killed by SIGKILL"):
            found.append(f"the log has {count} times: {event[:300]}")
    return found


def check_variety(ledger: Ledger, *, kills: int) -> list[str]:
    """All that the soak is there for has happened."""
    wanted = {"complete", "left"} | ({"dead", "cut"} if kills else set())
    return [
        f"no request was {fate}: the load has missed its purpose"
        for fate in FATES
        if fate in wanted and not ledger.fates[fate]
    ]
