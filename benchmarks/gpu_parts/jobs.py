"""Parts in processes of their own: an illegal access spoils a device for its process, and no part for another.

All parts of a model share a process, since a start takes longer than most of them. Families of checks run side by side:
whether a kernel is right does not depend on an idle device."""

from __future__ import annotations

import copy
import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
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
        beside: it runs at the same time as its neighbours that say so, too.
    """

    label: str
    arguments: tuple[str, ...]
    limit: float
    beside: bool = False


def plan(
    parts: Sequence[str], models: Sequence[str], checks: Sequence[str], of_an_engine: Sequence[str], limit: float
) -> list[Job]:
    """The processes of these parts: one for each family of checks, one for the sampler, one for each model.

    Args:
        of_an_engine: the parts that need one.
        limit: seconds of a part.
    """
    made = []
    if "kernels" in parts:
        made += [Job(f"kernels {name}", ("--parts", "kernels", "--checks", name), limit, True) for name in checks]
    if "sampler" in parts:
        made.append(Job("sampler", ("--parts", "sampler"), limit))
    if wanted := [part for part in of_an_engine if part in parts]:
        most = (1 + len(wanted)) * limit  # as long as a part again to load the model
        made += [Job(f"engine {model}", ("--parts", *wanted, "--models", model), most) for model in models]
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
    """The results that a process has kept so far, and the reason if they cannot be read."""
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
    """The merged result of all jobs; `keep` is given what there is as soon as it appears.

    Args:
        within: seconds of all together; what has not ended by then is killed, and the rest is not begun.
        stopped: whether all are to end now; asked several times a second.
    """
    end = time.monotonic() + within
    whole: dict[str, Any] = {"machine": {}, "rates": {}, "engines": {}, "parts": {}, "seconds": {}, "failures": {}}
    running: dict[int, dict[str, Any]] = {}
    lock = threading.Lock()

    def so_far() -> dict[str, Any]:
        merged = copy.deepcopy(whole)  # merged anew each time, and for good when the processes have ended
        for number in sorted(running):
            merge(merged, running[number])
        return merged

    def carry_out(number: int, job: Job) -> tuple[dict[str, Any], str | None]:
        rates = whole["rates"]
        known = ["--rates", *map(str, (rates["bandwidth"], rates["products"]))] if rates else []
        limit = min(job.limit, end - time.monotonic())

        def seen(found: dict[str, Any]) -> None:
            with lock:
                running[number] = found
                keep(so_far())

        if stopped():
            return {}, f"not begun: {STOPPED}"
        if limit <= 0:
            return {}, f"not begun: the {within:.0f} s of all parts are over"
        return run(job, limit, [*command, *known], folder / f"{number}.json", seen, stopped)

    for (beside, _), group in groupby(enumerate(jobs), lambda one: (one[1].beside, one[1].beside or one[0])):
        members = list(group)
        if beside:
            with ThreadPoolExecutor(len(members)) as pool:
                ended = list(pool.map(lambda one: carry_out(*one), members))
        else:
            ended = [carry_out(*one) for one in members]
        running.clear()
        for (_, job), (found, ending) in zip(members, ended, strict=True):
            merge(whole, found)
            if ending is not None:
                whole["failures"][job.label] = ending
                print(f"{job.label} FAILED: {ending}", file=sys.stderr, flush=True)
        keep(whole)
    return whole
