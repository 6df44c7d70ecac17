"""Ways to drive an engine step by step, and to see what it does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine import (
    AudioInput,
    Engine,
    EngineConfig,
    RequestOutput,
    SamplingParams,
    Seq2SeqInput,
    UnsupportedModelError,
)
from engine.scheduling.plan import StepPlan
from engine.scheduling.step import NextStep

Tokens = list[list[int]]

# "cuda" repeats the golden tests on a GPU (docs/gpu.md).
DEVICE = os.environ.get("OCTAVO_TEST_DEVICE", "cpu")
# "2" repeats them with two ranks, as threads; models that cannot be divided are skipped (docs/scale.md).
RANKS = int(os.environ.get("OCTAVO_TEST_RANKS", "1"))

# Lets a test that takes `engines` run at depth 0 and at depth 1.
BOTH_DEPTHS = pytest.mark.parametrize(
    "engines", [{"async_scheduling": False}, {"async_scheduling": True}], ids=["in-turn", "ahead"], indirect=True
)


@dataclass(frozen=True)
class Job:
    """A request to be."""

    prompt: Sequence[int]
    params: SamplingParams
    options: dict[str, Any] = field(default_factory=dict)


def make_engine(path: Any, **settings: Any) -> Engine:
    """A small float32 engine, on the CPU unless OCTAVO_TEST_DEVICE names a GPU; 1,024 pages unless told, steps that do
    not depend on the clock, and quantised weights that are made each time."""
    defaults = {"device": DEVICE, "dtype": "float32", "show_progress": False, "num_gpu_blocks_override": 1024}
    defaults |= {"max_step_time": 0, "quantization_cache": "off"}
    if RANKS == 1:
        return Engine(EngineConfig(model=str(path), **(defaults | settings)))
    from support.ranks import in_threads

    try:
        with in_threads():
            return Engine(EngineConfig(model=str(path), **(defaults | {"tensor_parallel_size": RANKS} | settings)))
    except UnsupportedModelError as error:
        pytest.skip(str(error))


def tokens_of(output: RequestOutput) -> Tokens:
    """The token ids of all answers."""
    return [answer.token_ids for answer in output.outputs]


def check_pages(engine: Engine) -> None:
    """No page is lost or counted wrongly."""
    engine.check_integrity()
    stats = engine.stats()
    assert stats.pages_free + stats.pages_held + stats.pages_cached == stats.pages_total


def check_idle(engine: Engine) -> None:
    """Nothing runs, so nothing is held: free + cached == total."""
    check_pages(engine)
    stats = engine.stats()
    assert not engine.has_unfinished_requests()
    assert stats.pages_held == stats.num_running == stats.num_waiting == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def add(engine: Engine, name: str, job: Job) -> None:
    """Queue a job."""
    engine.add_request(name, list(job.prompt), job.params, **job.options)


def logprobs(engine: Engine, text: list[int] | Seq2SeqInput | AudioInput) -> torch.Tensor:
    """The log-probabilities of a text's tokens, but for the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    engine.add_request("text", text, params)
    entries = finish(engine)["text"].prompt_logprobs
    assert entries is not None
    return torch.tensor([one.logprob for entry in entries if entry is not None for one in entry.values()])


def finish(engine: Engine, between: Callable[[int], None] | None = None) -> dict[str, RequestOutput]:
    """Step until nothing is left, checking the pages after each step; `between(i)` runs after step i."""
    outputs = {}
    for number in range(10_000):
        if not engine.has_unfinished_requests():
            check_idle(engine)
            return outputs
        for output in engine.step():
            outputs[output.request_id] = output
        check_pages(engine)
        if between is not None:
            between(number)
    raise AssertionError("the engine does not come to an end")


def answers(engine: Engine, jobs: Sequence[Job], between: Callable[[int], None] | None = None) -> list[RequestOutput]:
    """All that is said of the jobs, run together."""
    for number, job in enumerate(jobs):
        add(engine, str(number), job)
    outputs = finish(engine, between)
    return [outputs[str(number)] for number in range(len(jobs))]


def run(engine: Engine, jobs: Sequence[Job], between: Callable[[int], None] | None = None) -> list[Tokens]:
    """Run the jobs together; the token ids of their answers, in their order."""
    outputs = answers(engine, jobs, between)
    assert all(output.finished for output in outputs)
    return [tokens_of(output) for output in outputs]


def run_alone(engine: Engine, jobs: Sequence[Job]) -> list[Tokens]:
    """Run the jobs one after the other."""
    return [run(engine, [job])[0] for job in jobs]


def preempt_all(engine: Engine) -> int:
    """Take the pages of every running request, as the scheduler does when it is short of them; returns
    how many requests that hit."""
    scheduler = engine.scheduler
    running = list(scheduler._running)
    for group in reversed(running):
        scheduler._preempt(NextStep(0), group)
    return len(running)


class Strikes:
    """Preempts all running requests after every so many steps; `count` sums them."""

    def __init__(self, engine: Engine, every: int, at: int):
        self.engine, self.every, self.at, self.count = engine, every, at, 0

    def __call__(self, step: int) -> None:
        if step % self.every == self.at:
            self.count += preempt_all(self.engine)


@contextmanager
def watching(engine: Engine) -> Iterator[list[StepPlan]]:
    """Collects the plans that are launched."""
    plans: list[StepPlan] = []
    launch = engine.runner.launch

    def spy(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    engine.runner.launch = spy  # type: ignore[method-assign]
    try:
        yield plans
    finally:
        engine.runner.launch = launch  # type: ignore[method-assign]


def beam_rows(plan: StepPlan) -> int:
    """Sampled rows of a plan that belong to beams."""
    return 0 if plan.sampling is None else int((plan.sampling.table["beam_width"] > 0).sum())


def other_rows(plan: StepPlan) -> int:
    """Sampled rows of a plan that do not."""
    return 0 if plan.sampling is None else len(plan.sampling.rows) - beam_rows(plan)
