"""The sampler alone: the logits of a step on the device, and a token for each row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.execution.sampler import sample
from engine.interface.request import Decoding, Request
from engine.scheduling.batch import build_plan
from engine.scheduling.plan import SamplingBatch
from engine.scheduling.row import Row
from engine.scheduling.sequence import SequenceGroup
from gpu_parts import gaps
from gpu_parts.timing import synchronize

# What the rows of a step ask for, in turns.
MIXTURES: dict[str, tuple[dict[str, float], ...]] = {
    "greedy": ({"temperature": 0.0},),
    "temperature": ({"temperature": 0.8},),
    "top-k": ({"temperature": 0.8, "top_k": 50},),
    "top-p": ({"temperature": 0.8, "top_p": 0.95},),
    "min-p": ({"temperature": 0.8, "min_p": 0.05},),
    "top-k, top-p": ({"temperature": 0.8, "top_k": 50, "top_p": 0.9},),
    "a quarter of each": (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 50},
        {"temperature": 1.0, "top_p": 0.95},
        {"temperature": 1.0, "min_p": 0.05},
    ),
}


def _sure(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Logits of a model that has few tokens to choose from: the r-th likeliest of a row falls with 1 / r^2."""
    generator = torch.Generator(device).manual_seed(0)
    noise = torch.rand(rows, vocabulary, device=device, generator=generator)
    return -2.0 * (noise.argsort(-1) + 1.0).log()


def _doubtful(rows: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    """Logits of which top-p keeps thousands of tokens: normal with a deviation of 3."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(rows, vocabulary, device=device, generator=generator) * 3.0


SHAPES: dict[str, Callable[[int, int, torch.device], torch.Tensor]] = {"sure": _sure, "doubtful": _doubtful}


def batch_of(mixture: tuple[dict[str, float], ...], rows: int) -> SamplingBatch:
    """How rows are sampled, laid out as in a step."""
    made = []
    for number in range(rows):
        decoding = Decoding(max_tokens=8, seed=number, **mixture[number % len(mixture)])  # type: ignore[arg-type]
        group = SequenceGroup(Request(request_id=str(number), prompt_token_ids=(1, 2), decoding=decoding), number, b"")
        group.sequences[0].table.append(number + 1)
        made.append(Row(group, group.sequences[0], 1, 1, True))
    sampling = build_plan(made, [], 16).sampling
    assert sampling is not None
    return sampling


def sampler(device: torch.device, rows: int, vocabulary: int, repeats: int = 20) -> dict[str, Any]:
    """For each mixture the milliseconds that the device works, and those of the whole call with its answer on the
    host."""
    mixtures = []
    act = _sampler(device, rows)
    for shape, make in SHAPES.items():
        logits = make(rows, vocabulary, device)
        for name, mixture in MIXTURES.items():
            batch = batch_of(mixture, rows)
            whole = _whole(device, lambda logits=logits, batch=batch: act(logits, batch), repeats)
            busy = whole
            if device.type == "cuda":
                busy = _busy(device, lambda logits=logits, batch=batch: act(logits, batch), repeats)
            mixtures.append({"mixture": name, "logits": shape, "device_ms": 1e3 * busy, "call_ms": 1e3 * whole})
            print(
                f"  {name:20s} {shape:10s} {1e3 * busy:8.3f} ms of the device, {1e3 * whole:.3f} ms a call", flush=True
            )
    return {"rows": rows, "vocabulary": vocabulary, "mixtures": mixtures}


def _sampler(device: torch.device, rows: int) -> Callable[[torch.Tensor, SamplingBatch], Any]:
    """The engine's sampler. On a GPU it keeps its memory from step to step."""
    if device.type != "cuda":
        return sample
    from engine.execution.sampler_device import DeviceSampler

    made = DeviceSampler(device, rows)
    return lambda logits, batch: made.sample(logits, batch).result()


def _whole(device: torch.device, act: Callable[[], Any], repeats: int) -> float:
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 2):
            synchronize(device)
            started = time.perf_counter()
            act()
            synchronize(device)
            times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def _busy(device: torch.device, act: Callable[[], Any], repeats: int) -> float:
    """Seconds of a call in which the device does anything."""
    events: list[dict[str, Any]] = []
    with torch.inference_mode(), gaps.profiled(device, events):
        for _ in range(repeats):
            act()
    return gaps.length(gaps.on_device(events)) / repeats / 1e6
