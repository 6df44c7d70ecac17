"""The time in which a device is idle: a profile gives the intervals in which it works; the rest lies between two steps.

A profile is Chrome's trace as `torch.profiler` writes it. What runs on the device carries the number of the call that
launched it ("correlation"), and the call's time says which step it belongs to: the steps are marked on the host. A
kernel of a CUDA graph carries the number of the graph's launch.
"""

from __future__ import annotations

import bisect
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "octavo step"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Interval(NamedTuple):
    """From start to end, in any unit of time."""

    start: float
    end: float


class Step(NamedTuple):
    """A step's work on the device: its kernels, and all that kept the device busy, copies included."""

    kernels: list[Interval]
    busy: list[Interval]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time in intervals that do not touch, in their order."""
    joined: list[Interval] = []
    for one in sorted(intervals):
        if joined and one.start <= joined[-1].end:
            joined[-1] = Interval(joined[-1].start, max(joined[-1].end, one.end))
        else:
            joined.append(one)
    return joined


def length(intervals: Sequence[Interval]) -> float:
    """How much time is in at least one of them."""
    return sum(one.end - one.start for one in union(intervals))


def gaps(steps: Sequence[Sequence[Interval]]) -> list[float]:
    """The time between the end of the last interval of each step and the start of the first one of the next; 0 where
    they overlap. Steps without intervals are passed over."""
    full = [step for step in steps if step]
    ends = [max(one.end for one in step) for step in full]
    starts = [min(one.start for one in step) for step in full]
    return [max(0.0, start - end) for end, start in zip(ends[:-1], starts[1:], strict=True)]


def steps_of(events: Sequence[Mapping[str, Any]], device: str) -> list[Step]:
    """The work of each marked step on the device, in microseconds.

    Args:
        events: of a trace ("traceEvents").
        device: "cuda"; or "cpu", where torch's operations count as kernels, for a dry run.

    Raises:
        ValueError: no step is marked, or nothing ran on the device.
    """
    marks = _outermost(
        [_interval(event) for event in events if event.get("cat") == "user_annotation" and event.get("name") == MARK]
    )
    if not marks:
        raise ValueError("the profile has no marks of steps")
    starts = [mark.start for mark in marks]
    steps = [Step([], []) for _ in marks]
    launched: dict[int, float] = {}
    if device == "cuda":
        for event in events:
            number = _correlation(event)
            if event.get("cat") in _LAUNCHES and number is not None:
                launched[number] = float(event["ts"])
        work = sorted((e for e in events if e.get("cat") in _DEVICE), key=lambda event: float(event["ts"]))
    else:
        work = [event for event in events if event.get("cat") == "cpu_op"]
    if not work:
        raise ValueError("the profile shows nothing that ran on the device")
    place = -1
    for event in work:
        if device == "cuda":
            number = _correlation(event)
            if number in launched:  # else it goes where the event before it went
                place = bisect.bisect_right(starts, launched[number]) - 1
        else:
            place = bisect.bisect_right(starts, float(event["ts"])) - 1
        if place < 0:
            continue  # asked for before the first step
        steps[place].busy.append(_interval(event))
        if event.get("cat") in ("kernel", "cpu_op"):
            steps[place].kernels.append(_interval(event))
    return steps


def on_device(events: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """When a GPU did anything, in microseconds."""
    return [_interval(event) for event in events if event.get("cat") in _DEVICE]


def by_name(events: Sequence[Mapping[str, Any]], device: str, count: int = 12) -> list[dict[str, Any]]:
    """The work that kept the device busy: names, number of runs, and total microseconds, the largest first."""
    kinds = _DEVICE if device == "cuda" else ("cpu_op",)
    spent: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") in kinds:
            spent.setdefault(str(event.get("name")), []).append(float(event.get("dur", 0.0)))
    found = [{"name": name, "times": len(each), "us": round(sum(each), 1)} for name, each in spent.items()]
    return sorted(found, key=lambda one: -one["us"])[:count]


def _interval(event: Mapping[str, Any]) -> Interval:
    start = float(event["ts"])
    return Interval(start, start + float(event.get("dur", 0.0)))


def _correlation(event: Mapping[str, Any]) -> int | None:
    number = event.get("args", {}).get("correlation")
    return None if number is None else int(number)


def _outermost(marks: Sequence[Interval]) -> list[Interval]:
    """Without those that lie within another."""
    kept: list[Interval] = []
    for mark in sorted(marks, key=lambda one: (one.start, -one.end)):
        if not kept or mark.start >= kept[-1].end:
            kept.append(mark)
    return kept


@contextmanager
def marked(runner: Any) -> Iterator[None]:
    """Let a runner mark its steps in profiles: all that it asks of the device between two marks is one step's."""
    names = [name for name in ("launch", "execute") if hasattr(runner, name)]

    def marking(name: str) -> Any:
        plain = getattr(runner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            with record_function(MARK):
                return plain(*arguments, **named)

        return call

    for name in names:
        setattr(runner, name, marking(name))
    try:
        yield
    finally:
        for name in names:
            delattr(runner, name)  # what is left is the class's


@contextmanager
def profiled(device: torch.device, events: list[dict[str, Any]]) -> Iterator[None]:
    """Profile what is done meanwhile; the events are appended."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, acc_events=True) as found:
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        events.extend(json.loads(file.read_text())["traceEvents"])
