"""Steps that hold a prompt, for which the rows of others that decode wait."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine import Engine, SamplingParams
from gpu_parts.decode import Rows, decoding_rows, pace
from gpu_parts.floors import Rates, mixed_floor_seconds
from gpu_parts.shapes import Sizes, Work, prompt
from gpu_parts.timing import synchronize


def mixed(engine: Engine, work: Work, rates: Rates, sizes: Sizes) -> Iterator[dict[str, Any]]:
    """A row for each number of rows that decode beside a chunk of a prompt: a step's time, what of it the host takes to
    launch, and how near it is to the floor of its work."""
    for rows in sizes.mixed_rows:
        with decoding_rows(engine, rows, sizes, steps=2 * (sizes.steps + sizes.warm)) as ready:
            plain = pace(ready.run(sizes.steps))
            before, launches = ready.context, []
            with timed_launches(engine.runner, launches):
                times, replayed = beside_prompts(engine, ready, sizes)
            context = (before + ready.context) / 2
        seconds, floor = pace(times), mixed_floor_seconds(work, rates, rows, context, sizes.mixed_chunk)
        row = {
            "rows": rows,
            "context": round(context),
            "chunk": sizes.mixed_chunk,
            "steps": len(times),
            "steps_as_graphs": replayed,
            "step_ms": 1e3 * seconds,
            "decode_ms": 1e3 * plain,
            "launch_ms": 1e3 * statistics.median(launches),
            "floor_ms": 1e3 * floor,
            "times_floor": seconds / floor,
        }
        print(
            f"  {rows:4d} rows and {sizes.mixed_chunk} tokens of a prompt: {row['step_ms']:.3f} ms a step, of which "
            f"the host launches for {row['launch_ms']:.3f} ms; without the prompt {row['decode_ms']:.3f}; floor "
            f"{row['floor_ms']:.3f} ms: {row['times_floor']:.2f} times that",
            flush=True,
        )
        yield row


def _replayed(engine: Engine) -> int:
    """Steps so far that hold prompts and ran as CUDA graphs."""
    graphs = engine.runner.prompt_graphs
    return 0 if graphs is None else graphs.num_replayed


def beside_prompts(engine: Engine, ready: Rows, sizes: Sizes) -> tuple[list[float], int]:
    """Seconds of each of some steps, each of which has a new prompt of one chunk beside the rows; how many of these
    steps ran as CUDA graphs.

    Raises:
        RuntimeError: a step had other work.
    """
    vocab, chunk, times = engine.info.vocab_size, sizes.mixed_chunk, []
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    # What is planned one step ahead does not know of the first prompt yet.
    numbers = range(sizes.warm + 1 + sizes.steps)
    prompts = [prompt(2_000_000 + 1000 * ready.count + number, chunk, vocab) for number in numbers]
    synchronize(engine.runner.model.device)
    done, replayed = [], []
    for number in numbers:
        done.append(engine.stats())
        replayed.append(_replayed(engine))
        started = time.perf_counter()
        engine.add_request(f"prompt-{number}", prompts[number], params)
        engine.step_deltas()
        times.append(time.perf_counter() - started)
    before, after = done[-sizes.steps], engine.stats()
    made = after.computed_tokens - before.computed_tokens
    if made != sizes.steps * (ready.count + chunk) or after.num_preemptions != before.num_preemptions:
        raise RuntimeError(
            f"{sizes.steps} steps of {ready.count} rows and {chunk} tokens of a prompt computed {made} tokens: they "
            "were not all alike"
        )
    return times[-sizes.steps :], _replayed(engine) - replayed[-sizes.steps]


@contextmanager
def timed_launches(runner: Any, seconds: list[float]) -> Iterator[None]:
    """Collect what each launch of a step takes the host."""
    plain = runner.launch

    def launch(plan: Any) -> Any:
        began = time.perf_counter()
        try:
            return plain(plan)
        finally:
            seconds.append(time.perf_counter() - began)

    runner.launch = launch
    try:
        yield
    finally:
        del runner.launch  # what is left is the class's
