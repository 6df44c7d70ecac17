"""Steps that decode, prompts, and searches: the engine's own loop on the clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from engine import Engine, SamplingParams
from gpu_parts import gaps
from gpu_parts.floors import Rates, floor_seconds, intensity
from gpu_parts.shapes import Sizes, Work, prompt, ways_of_one_row
from gpu_parts.timing import synchronize

# Steps that prompts may take before something is wrong.
_PATIENCE = 100_000


def pace(times: Sequence[float], together: int = 8) -> float:
    """Seconds of a step: the median of the means of so many steps each.

    One step ahead, single calls say little: what one waits for, the next one does not.
    """
    means = [statistics.fmean(times[at : at + together]) for at in range(0, len(times), together)]
    return statistics.median(means)


class Rows:
    """Requests that decode together, for as long as they are needed; a context manager.

    Args:
        count: rows of a step.
        length: tokens of each prompt.
        answer: tokens that each row may have beyond it.
        beams: rows of a request.
    """

    def __init__(self, engine: Engine, count: int, *, length: int, answer: int, beams: int = 1):
        self.engine, self.count, self.length, self.beams = engine, count, length, beams
        self._params = SamplingParams(
            temperature=0.0, max_tokens=answer, ignore_eos=True, num_beams=beams, n=1, logprobs=None
        )
        self._ids = [f"row-{number}" for number in range(count // beams)]
        self.steps = 0  # in which all rows decoded

    def __enter__(self) -> Rows:
        """Compute the prompts, until a step has nothing but one token of each row."""
        vocab = self.engine.info.vocab_size
        for number, name in enumerate(self._ids):
            self.engine.add_request(name, prompt(number, self.length, vocab), self._params)
        for _ in range(_PATIENCE):
            before = self.engine.stats().computed_tokens
            self.engine.step_deltas()
            stats = self.engine.stats()
            if not stats.num_waiting and stats.computed_tokens - before == self.count:
                return self
        raise RuntimeError(f"{self.count} rows never decoded together: {self.engine.stats()}")

    def __exit__(self, *error: object) -> None:
        for name in self._ids:
            self.engine.abort_request(name)
        while self.engine.has_unfinished_requests():
            self.engine.step_deltas()

    def run(self, steps: int) -> list[float]:
        """Seconds of each of some steps.

        Raises:
            RuntimeError: a step had other work than one token of each row.
        """
        device = self.engine.runner.model.device
        before, times = self.engine.stats(), []
        synchronize(device)
        for _ in range(steps):
            started = time.perf_counter()
            self.engine.step_deltas()
            times.append(time.perf_counter() - started)
        after = self.engine.stats()
        made = after.computed_tokens - before.computed_tokens
        if made != steps * self.count or after.num_preemptions != before.num_preemptions:
            raise RuntimeError(f"{steps} steps of {self.count} rows computed {made} tokens: they were not all alike")
        self.steps += steps
        return times

    @property
    def context(self) -> float:
        """Tokens that a row has, in the mean, by what the pages of all rows hold."""
        groups = list(self.engine.scheduler.groups())
        lengths = [sequence.num_tokens for group in groups for sequence in group.sequences]
        return statistics.fmean(lengths)


def decode(engine: Engine, work: Work, rates: Rates, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """A row for each batch size: a step's time, and how near it is to the floor.

    Largest first: the prompts of the others are then in the prefix cache. Each row still has pages of its own.
    """
    for name, found in ways_of_one_row(engine).items():
        told = ", ".join(f"{milliseconds:.3f} ms with {way}" for way, milliseconds in found["ms"].items())
        print(f"  one row's {name}: {told}; kept: {found['kept']}", flush=True)
    for rows in sorted(sizes.batches, reverse=True):
        row = _decoding(engine, rows, work, rates, sizes)
        print(line_of(row), flush=True)
        yield row


def _decoding(engine: Engine, rows: int, work: Work, rates: Rates, sizes: Sizes) -> dict[str, Any]:
    with decoding_rows(engine, rows, sizes) as ready:
        ready.run(sizes.warm)
        before, replayed, ahead = ready.context, _replayed(engine), engine.stats().num_steps_ahead
        times = ready.run(sizes.steps)
        context, replayed = (before + ready.context) / 2, _replayed(engine) - replayed
        ahead = engine.stats().num_steps_ahead - ahead
    seconds = pace(times)
    floor = floor_seconds(work, rates, rows, context)
    flops, per_byte = intensity(work, rows, context)
    return {
        "rows": rows,
        "context": round(context),
        "steps": len(times),
        "steps_as_graphs": replayed,
        "steps_ahead": ahead,
        "step_ms": 1e3 * seconds,
        "mean_ms": 1e3 * statistics.fmean(times),
        "slowest_ms": 1e3 * max(times),
        "tokens_per_second": rows / seconds,
        "floor_ms": 1e3 * floor,
        "percent_of_floor": 100 * floor / seconds,
        "flops_per_second": flops / seconds,
        "flops_per_byte": per_byte,
    }


def _replayed(engine: Engine) -> int:
    """Steps so far that ran as CUDA graphs."""
    graphs = engine.runner.graphs
    return 0 if graphs is None else graphs.num_replayed


def line_of(row: dict[str, Any]) -> str:
    """A row of decoding for people."""
    return (
        f"  {row['rows']:4d} rows, {row['context']} tokens each: {row['step_ms']:8.3f} ms a step (mean "
        f"{row['mean_ms']:.3f}), {row['tokens_per_second']:9.0f} tokens/s, floor {row['floor_ms']:.3f} ms: "
        f"{row['percent_of_floor']:.0f}%"
    )


def decoding_rows(engine: Engine, rows: int, sizes: Sizes, *, steps: int | None = None, beams: int = 1) -> Rows:
    """Rows that have the context in the middle of the steps that will be timed."""
    steps = sizes.steps if steps is None else steps
    # The first rows decode while the last ones' prompts are computed.
    prefill = rows // beams * sizes.context // sizes.chunk + 2
    length = max(sizes.context - sizes.warm - steps // 2 - prefill // 2, 4)
    return Rows(engine, rows, length=length, answer=2 * prefill + sizes.warm + steps + 16, beams=beams)


def gap(engine: Engine, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """How long the device is idle between two steps, by a profile, and in a step, by that and the clock."""
    device = engine.runner.model.device
    for rows in sizes.gap_batches:
        events: list[dict[str, Any]] = []
        with decoding_rows(engine, rows, sizes, steps=3 * sizes.gap_steps) as ready:
            ready.run(sizes.warm)
            plain = pace(ready.run(sizes.gap_steps))
            with gaps.marked(engine.runner), gaps.profiled(device, events):
                slowed = pace(ready.run(sizes.gap_steps))
        # The first steps of a profile pay for its start; what the last one asked for may have been cut off.
        steps = gaps.steps_of(events, device.type)[2:-1]
        between = gaps.gaps([step.kernels for step in steps])
        busy = statistics.median(gaps.length(step.busy) for step in steps)
        row = {
            "rows": rows,
            "gap_us": statistics.median(between),
            "largest_gap_us": max(between),
            "steps": len(steps),
            "kernels_a_step": statistics.median(len(step.kernels) for step in steps),
            "busy_us": busy,
            "step_us": 1e6 * plain,
            "step_us_profiled": 1e6 * slowed,
            "idle_us_a_step": max(0.0, 1e6 * plain - busy),
            "steps_profiled": sizes.gap_steps,
            "busiest": gaps.by_name(events, device.type),
        }
        print(
            f"  {rows:4d} rows: {row['gap_us']:.1f} us between steps (largest {row['largest_gap_us']:.1f}); a step of "
            f"{row['step_us']:.0f} us has {row['kernels_a_step']:.0f} kernels, and the device works for {busy:.0f} us",
            flush=True,
        )
        yield row


def prefill(engine: Engine, work: Work, rates: Rates, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """A row for each length of a prompt, which runs alone and has an answer of one token."""
    device = engine.runner.model.device
    for length in sizes.prompts:
        times = [_prompt(engine, length, number) for number in range(sizes.rounds + 1)][1:]
        seconds = statistics.median(times)
        events: list[dict[str, Any]] = []
        with gaps.profiled(device, events):
            _prompt(engine, length, -1)
        products, attention = work.prefill_flops(length)
        row = {
            "tokens": length,
            "chunk": sizes.chunk,
            "seconds": seconds,
            "tokens_per_second": length / seconds,
            "flops_per_second": products / seconds,
            "flops_per_byte": products / work.weight_bytes / math.ceil(length / sizes.chunk),
            "percent_of_peak": 100 * products / seconds / rates.products,
            "percent_of_peak_with_attention": 100 * (products + attention) / seconds / rates.products,
            "busiest": gaps.by_name(events, device.type),
        }
        print(
            f"  {length:6d} tokens: {1e3 * seconds:8.1f} ms, {row['tokens_per_second']:9.0f} tokens/s, "
            f"{row['flops_per_second'] / 1e12:.1f} TFLOP/s in matrices: {row['percent_of_peak']:.0f}% of the peak "
            f"({row['percent_of_peak_with_attention']:.0f}% with attention)",
            flush=True,
        )
        yield row


def _prompt(engine: Engine, length: int, number: int) -> float:
    """Seconds from a request to its only token; no page of it is in the cache."""
    ids = prompt(1_000_000 + 1000 * length + number, length, engine.info.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    device = engine.runner.model.device
    synchronize(device)
    before, started = engine.stats(), time.perf_counter()
    engine.add_request("prompt", ids, params)
    while engine.has_unfinished_requests():
        engine.step_deltas()
    synchronize(device)
    seconds, after = time.perf_counter() - started, engine.stats()
    if after.computed_tokens - before.computed_tokens != length:
        raise RuntimeError(f"a prompt of {length} tokens was computed in {after.computed_tokens} tokens")
    return seconds


def beams(engine: Engine, sizes: Sizes, width: int = 4) -> Iterator[dict[str, Any]]:
    """Steps of beams beside greedy steps of as many rows; `steps` and those that were graphs are of both together."""
    for rows in sizes.beam_rows:
        medians, steps, as_graphs = [], 0, 0
        for wide in (1, width):
            with decoding_rows(engine, rows, sizes, beams=wide) as ready:
                ready.run(sizes.warm)
                replayed = _replayed(engine)
                times = ready.run(sizes.steps)
                as_graphs += _replayed(engine) - replayed
            medians.append(pace(times))
            steps += len(times)
        greedy, searching = medians
        print(
            f"  {rows:4d} rows: greedy {1e3 * greedy:.3f} ms a step, {width} beams {1e3 * searching:.3f} ms: "
            f"{100 * greedy / searching:.0f}%",
            flush=True,
        )
        yield {
            "rows": rows,
            "beams": width,
            "steps": steps,
            "steps_as_graphs": as_graphs,
            "greedy_ms": 1e3 * greedy,
            "beams_ms": 1e3 * searching,
            "percent_of_greedy": 100 * greedy / searching,
        }


def answer_all(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, float]:
    """Seconds for greedy answers of so many tokens to all prompts, which run together, and of the median step.

    Raises:
        RuntimeError: an answer has another length.
    """
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    made = [0] * len(prompts)
    steps = []
    started = time.perf_counter()
    for number, ids in enumerate(prompts):
        engine.add_request(str(number), list(ids), params)
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        deltas = engine.step_deltas()
        steps.append(time.perf_counter() - began)
        for delta in deltas:
            made[int(delta.request_id)] += sum(len(one.token_ids) for one in delta.choices)
    seconds = time.perf_counter() - started
    if set(made) != {tokens}:
        raise RuntimeError(f"answers have {sorted(set(made))} tokens instead of {tokens}")
    return seconds, statistics.median(steps)
