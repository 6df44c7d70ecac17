"""The time of one engine's steps on this machine, and the error of a simulation that predicts it."""

from __future__ import annotations

import gc
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fleets.fleet import Fleet
from fleets.replica import Request, Service, serviceable


def measure(rounds: int) -> dict[str, Any]:
    """The time of one engine's steps, and the latencies of an engine and of its simulation for the same arrivals."""
    import torch
    from offline import SHAPE, machine, make_checkpoint

    from engine import LLM

    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), torch.bfloat16)
        llm = LLM(
            folder, skip_tokenizer_init=True, dtype="bfloat16", device="cpu", kv_cache_memory="1GiB", max_step_time=0.0,
            show_progress=False, seed=0,
        )  # fmt: skip
        samples = [sample for _ in range(rounds) for sample in _samples(llm.engine, SHAPE["vocab_size"])]
        service = fit(samples)
        checks = [_check(llm.engine, service, SHAPE["vocab_size"], load) for load in (0.3, 0.7)]
        llm.close()
    return {
        "machine": machine(),
        "model": "random weights of SmolLM2-135M's shape, bfloat16",
        "service": asdict(service),
        "samples": [
            {**sample, "seconds": round(sample["seconds"], 5), "fitted": round(foretold(service, sample), 5)}
            for sample in _medians(samples)
        ],
        "checks": checks,
    }


def foretold(service: Service, sample: dict[str, float]) -> float:
    """Seconds that a step should take."""
    decoding = sample["rows"] * service.row + sample["context"] * service.context
    return service.step + decoding + service.prompt(int(sample["start"]), int(sample["tokens"]))


def fit(samples: Sequence[dict[str, float]]) -> Service:
    """The service whose steps are nearest to what was measured, relatively; nothing takes less than no time."""
    from scipy.optimize import nnls

    medians = _medians(samples)
    columns = [
        [
            1.0,
            sample["tokens"],
            sample["tokens"] * (sample["start"] + (sample["tokens"] + 1) / 2),
            sample["rows"],
            sample["context"],
        ]
        for sample in medians
    ]
    seconds = np.array([sample["seconds"] for sample in medians])
    found, _ = nnls(np.array(columns) / seconds[:, None], np.ones(len(seconds)))
    return Service(*map(float, found))


def _medians(samples: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Medians of a step's times, measured several times."""
    groups: defaultdict[tuple[float, ...], list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample["tokens"], sample["start"], sample["rows"], sample["context"]].append(sample["seconds"])
    names = ("tokens", "start", "rows", "context")
    return [dict(zip(names, key, strict=True)) | {"seconds": statistics.median(all)} for key, all in groups.items()]


def _samples(engine: Any, vocabulary: int) -> Iterable[dict[str, float]]:
    """Steps of one kind each: chunks of a prompt, and rows that decode."""
    for length in (64, 256, 1024, 2040):
        _add(engine, "p", [length], 1, vocabulary)
        yield {"tokens": length, "start": 0, "rows": 0, "context": 0, "seconds": _timed(engine)}
        _drain(engine)
    for rows, context in ((1, 64), (1, 1500), (4, 500), (16, 64), (16, 1000), (48, 300)):
        _add(engine, "d", [context] * rows, 24, vocabulary)
        while len(list(engine.scheduler.groups())) != rows or not all(g.started for g in engine.scheduler.groups()):
            engine.step_deltas()
        now = sum(g.sequences[0].num_tokens for g in engine.scheduler.groups())
        seconds = statistics.median(_timed(engine) for _ in range(9))
        yield {"tokens": 0, "start": 0, "rows": rows, "context": now + 4 * rows, "seconds": seconds}
        for group in list(engine.scheduler.groups()):
            engine.abort_request(group.request.request_id)


def _timed(engine: Any) -> float:
    began = time.perf_counter()
    engine.step_deltas()
    return time.perf_counter() - began


def _add(engine: Any, name: str, lengths: Sequence[int], output: int, vocabulary: int) -> None:
    from engine import SamplingParams

    rng = np.random.default_rng()  # nothing is to be found in the cache
    for place, length in enumerate(lengths):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.add_request(f"{name}{place}", rng.integers(3, vocabulary, length).tolist(), params)


def _drain(engine: Any) -> None:
    while engine.has_unfinished_requests():
        engine.step_deltas()


def _check(engine: Any, service: Service, vocabulary: int, load: float, count: int = 40) -> dict[str, float]:
    """The same arrivals for the engine and for its simulation."""
    rng = random.Random(round(100 * load))
    kinds = [Request(0.0, rng.randint(50, 1200), rng.randint(8, 60)) for _ in range(count)]
    rate, moment = load * serviceable(service, kinds), 0.0
    for request in kinds:
        moment += rng.expovariate(rate)
        request.arrival = moment
    fleet = Fleet(replace(service, most_seconds=math.inf), 1, "random")
    fleet.run(replace(request) for request in kinds)
    measured = _arrive(engine, kinds, vocabulary)

    def mean(found: Iterable[Request], moment: str) -> float:
        return round(statistics.fmean(getattr(request, moment) - request.arrival for request in found), 3)

    return {
        "load": load,
        "requests": count,
        "first_token_measured": mean(measured, "first"),
        "first_token_simulated": mean(fleet.ended, "first"),
        "whole_measured": mean(measured, "end"),
        "whole_simulated": mean(fleet.ended, "end"),
    }


def _arrive(engine: Any, kinds: Sequence[Request], vocabulary: int) -> list[Request]:
    from engine import SamplingParams

    tokens = np.random.default_rng()
    found = {str(number): replace(request) for number, request in enumerate(kinds)}
    waiting, began = deque(found.items()), time.perf_counter()
    gc.collect()
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - began
        while waiting and waiting[0][1].arrival <= now:
            name, request = waiting.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=request.output, ignore_eos=True)
            engine.add_request(name, tokens.integers(3, vocabulary, request.tokens).tolist(), params)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[0][1].arrival - now))
            continue
        for delta in engine.step_deltas():
            now = time.perf_counter() - began
            if delta.choices and math.isnan(found[delta.request_id].first):
                found[delta.request_id].first = now
            if delta.finished:
                found[delta.request_id].end = now
    return list(found.values())
