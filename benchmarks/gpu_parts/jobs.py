"""Each part in a process of its own: an illegal access spoils a device for its process, and no part for another."""

from __future__ import annotations

import copy
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# How a process ends, and why others are not begun, when this one was told to end.
STOPPED = "ended, as the whole run was told to by SIGTERM"
# Seconds between two looks at a process and what it has kept.
_LOOK = 0.1


@dataclass(frozen=True)
class Job:
    """A process.

    Attributes:
        label: of its failure, if it has one.
        arguments: of the benchmark.
        limit: seconds after which it is killed; its parts have lower ones of their own.
    """

    label: str
    arguments: tuple[str, ...]
    limit: float


def plan(
    parts: Sequence[str], models: Sequence[str], checks: Sequence[str], of_an_engine: Sequence[str], limit: float
) -> list[Job]:
    """The processes of these parts: one for each family of checks, and one for each part of each model; what says most
    first.

    Args:
        of_an_engine: the parts that need one.
        limit: seconds of a part.
    """
    made = []
    if "kernels" in parts:
        made += [Job(f"kernels {name}", ("--parts", "kernels", "--checks", name), limit) for name in checks]
    if "sampler" in parts:
        made.append(Job("sampler", ("--parts", "sampler"), limit))
    for part in of_an_engine:
        if part in parts:  # as long again to load the model
            made += [Job(f"{part} {model}", ("--parts", part, "--models", model), 2 * limit) for model in models]
    return made


def run(
    job: Job,
    limit: float,
    command: Sequence[str],
    output: Path,
    seen: Callable[[dict[str, Any]], None],
    stopped: Callable[[], bool],
) -> tuple[dict[str, Any], str | None]:
    """Run a process, whose output goes on to ours; what it kept, and how it ended if that was not by itself. It never
    outlives this call, whatever ends that.

    Args:
        limit: seconds after which it is killed.
        command: the benchmark, to which the job's arguments and --output are added.
        output: where it keeps its result.
        seen: is given what it kept so far, each time that this is new.
        stopped: whether it is to be killed now.
    """
    ending, status, version, end = None, None, None, time.monotonic() + limit
    process = subprocess.Popen([*command, *job.arguments, "--output", str(output)])
    try:
        while ending is None and (status := process.poll()) is None:
            time.sleep(_LOOK)
            if stopped():
                ending = STOPPED
            elif time.monotonic() >= end:
                ending = f"killed after {limit:.0f} s"
            elif (now := _version(output)) != version:
                version, (found, problem) = now, kept(output)
                if problem is None:
                    seen(found)
    finally:
        process.kill()  # nothing where it has ended
        process.wait()
    if status is not None and status < 0:
        ending = f"ended by {signal.Signals(-status).name}"
    elif status not in (None, 0, 1):
        ending = f"ended with the status {status}"
    found, problem = kept(output)
    if not found and ending is None and problem is None:
        ending = f"ended with the status {status} before it had anything"
    return found, "; ".join(filter(None, (ending, problem))) or None


def _version(file: Path) -> tuple[int, ...] | None:
    """Another one after each change of a file; None where there is none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def kept(output: Path) -> tuple[dict[str, Any], str | None]:
    """What a process has kept so far, and why that cannot be read if it cannot."""
    if not output.exists():
        return {}, None
    try:
        found = json.loads(output.read_text())
    except ValueError as error:  # of JSON and of UTF-8
        return {}, f"what it kept cannot be read: {error}"
    return found, None


def merge(whole: dict[str, Any], found: dict[str, Any]) -> None:
    """Add a process's result to that of all; what was measured once, as the machine and its rates, is the first's.

    Each process starts its engine. The first start of a model compiles kernels; later ones find them in Triton's cache.
    """
    for part, figures in found.get("parts", {}).items():
        if part == "start":
            for model, start in figures.items():
                if first := whole["parts"].setdefault(part, {}).get(model):
                    first.setdefault("later_seconds", []).append(start["seconds"])
                else:
                    whole["parts"][part][model] = start
        elif isinstance(figures, list):
            whole["parts"].setdefault(part, []).extend(figures)
        else:
            whole["parts"].setdefault(part, {}).update(figures)
    for name in ("engines", "seconds", "failures"):
        whole[name].update(found.get(name, {}))
    for name in ("machine", "rates"):
        if not whole[name]:
            whole[name] = found.get(name, {})


def run_all(
    jobs: Sequence[Job],
    command: Sequence[str],
    folder: Path,
    keep: Callable[[dict[str, Any]], None],
    within: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """The merged result of all jobs, each after the other; `keep` is given what there is as soon as it appears.

    Args:
        within: seconds of all together; what has not ended by then is killed, and the rest is not begun.
        stopped: whether all are to end now; asked several times a second.
    """
    end = time.monotonic() + within
    whole: dict[str, Any] = {"machine": {}, "rates": {}, "engines": {}, "parts": {}, "seconds": {}, "failures": {}}

    def seen(found: dict[str, Any]) -> None:
        so_far = copy.deepcopy(whole)  # merged anew each time, and for good when the process has ended
        merge(so_far, found)
        keep(so_far)

    for number, job in enumerate(jobs):
        rates = whole["rates"]
        known = ["--rates", *map(str, (rates["bandwidth"], rates["products"]))] if rates else []
        limit = min(job.limit, end - time.monotonic())
        found: dict[str, Any] = {}
        if stopped():
            ending: str | None = f"not begun: {STOPPED}"
        elif limit > 0:
            found, ending = run(job, limit, [*command, *known], folder / f"{number}.json", seen, stopped)
        else:
            ending = f"not begun: the {within:.0f} s of all parts are over"
        merge(whole, found)
        if ending is not None:
            whole["failures"][job.label] = ending
            print(f"{job.label} FAILED: {ending}", file=sys.stderr, flush=True)
        keep(whole)
    return whole
