"""Time on a device, and what the device can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from gpu_parts.floors import Rates


def synchronize(device: torch.device) -> None:
    """Wait until all that was asked of a device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """The median seconds of some work on a device, of so many repetitions after two that do not count."""
    for _ in range(2):
        work()
    synchronize(device)
    if device.type != "cuda":
        return statistics.median(_clocked(work) for _ in range(repeats))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        work()
        end.record()
    synchronize(device)
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in marks)


def _clocked(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure_rates(device: torch.device, *, copied: int, product: int, repeats: int = 20) -> Rates:
    """The best this machine does: reading `copied` bytes once (decoding only reads, and a copy is slower per byte), and
    a square product of `product` rows in bfloat16.

    Numbers are random: a GPU that multiplies zeros takes less power, and keeps a higher clock than it ever has at work.
    """
    rates = Rates(bandwidth=_read(device, copied, repeats), products=_multiplied(device, product, repeats))
    if device.type == "cuda":  # what torch keeps for later would count as taken
        torch.cuda.empty_cache()
    return rates


def _read(device: torch.device, copied: int, repeats: int) -> float:
    source = torch.randn(copied // 2, dtype=torch.bfloat16, device=device)
    reading = min(
        seconds_of(device, lambda: source.sum(dtype=torch.float32), repeats),
        seconds_of(device, lambda: source.amax(), repeats),
    )
    return float(copied) / reading


def _multiplied(device: torch.device, product: int, repeats: int) -> float:
    left, right = (torch.randn(product, product, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    multiplying = seconds_of(device, lambda: torch.mm(left, right, out=out), repeats)
    return 2.0 * product**3 / multiplying
