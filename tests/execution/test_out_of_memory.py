"""Memory that is not there for a step fails no request: each gets what it would have got with more, bit by bit."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ahead import Late
from support.checkpoints import random_prompt
from support.driving import Job, add, answers, check_idle, finish, make_engine, preempt_all, tokens_of, watching
from support.jobs import MIXED, beams, greedy, prompt, sampled
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES

from engine import Engine, EngineDeadError, PoolingParams
from engine.execution import recovery
from engine.execution.pending import LateStep
from engine.execution.recording import eager
from engine.scheduling.plan import Int32, StepPlan, StepResult

JOBS = [
    *MIXED,
    Job(prompt(71, 30), sampled(3, 18, logprobs=0, prompt_logprobs=2)),
    Job(prompt(73, 25), sampled(5, 12, n=4, temperature=0.9, logprobs=2)),
]
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB, made by the test"
POISON = 300  # no other prompt begins with it
assert all(job.prompt[0] != POISON for job in JOBS)

Fault = Callable[[StepPlan], bool]


def size(plan: StepPlan) -> int:
    return plan.num_tokens + (0 if plan.encoder is None else len(plan.encoder.token_ids))


def above(tokens: int, rows: int = 10**6) -> Fault:
    return lambda plan: size(plan) > tokens or plan.num_rows > rows


def at_times(seed: int, share: float) -> Fault:
    """Whatever could be smaller, now and then."""
    rng = random.Random(seed)
    return lambda plan: plan.num_rows + (plan.encoder is None) * plan.num_tokens > 2 and rng.random() < share


FAULTS = {"40": above(40), "9x2": above(9, 2), "1": above(1), "times": at_times(1, 0.4)}


@contextmanager
def shortage(engine: Engine, fault: Fault, when: str = "launched") -> Iterator[list[StepPlan]]:
    """Memory is short for the plans that `fault` names: before they have computed anything, when pages are written, or
    when the answer is read. Gives these plans."""
    launch, raised = engine.runner.launch, list[StepPlan]()

    def fail() -> None:
        raise torch.OutOfMemoryError(MESSAGE)

    def limited(plan: StepPlan) -> LateStep:
        if not fault(plan):
            return launch(plan)
        raised.append(plan)
        if when == "before":
            fail()
        step = launch(plan)
        if when == "launched":
            fail()
        assert isinstance(step.candidates, StepResult)
        step.candidates = Late(step.candidates, fail)
        return step

    engine.runner.launch = limited  # type: ignore[method-assign]
    try:
        yield raised
    finally:
        engine.runner.launch = launch  # type: ignore[method-assign]


@contextmanager
def forgetful() -> Iterator[None]:
    """The next step is tried at twice the size of the last one that went well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "_PATIENCE", 1)
        patch.setattr(recovery, "_MOST_PATIENCE", 1)
        yield


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("when", ["before", "launched", "read"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.slow
def test_nothing_that_is_said_differs(fault: Fault, when: str, ahead: bool, engines: Callable[..., Engine]) -> None:
    settings = {"block_size": 4, "num_gpu_blocks_override": 150}
    plain, one = engines(**settings), engines(async_scheduling=ahead, **settings)
    expected = answers(plain, JOBS)
    assert not plain.stats().num_oom_retries
    with forgetful(), shortage(one, fault, when) as raised:
        assert answers(one, JOBS) == expected
    assert len(raised) > 2
    assert 0 < one.stats().num_oom_retries <= len(raised)
    assert one.stats().num_finished == len(JOBS)
    if ahead and fault is FAULTS["40"]:  # elsewhere no step is planned before it is known to fit
        assert one.stats().num_steps_ahead > 10


@pytest.mark.parametrize("seed", range(3))
def test_beside_all_that_happens_to_pages(seed: int, engines: Callable[..., Engine]) -> None:
    """Pages are few, all are taken away now and then, and prompts come in chunks."""
    plain = engines()
    settings: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 60, "max_num_batched_tokens": 24}
    one = engines(max_num_seqs=16, async_scheduling=seed % 2 == 1, enable_prefix_caching=seed != 2, **settings)
    with forgetful(), shortage(one, at_times(seed, 0.5)) as raised:
        found = answers(one, JOBS, between=lambda n: preempt_all(one) if n in (5, 15, 30, 200) else None)
    assert list(map(tokens_of, found)) == list(map(tokens_of, answers(plain, JOBS)))
    assert len(raised) > 20
    assert one.stats().num_preemptions > 5
    assert one.stats().num_page_copies > 5


def test_later_steps_hold_what_went_well(engines: Callable[..., Engine]) -> None:
    """Not every step has to fail first."""
    one = engines(max_num_batched_tokens=64)
    jobs = [Job(prompt(number, 60), greedy(30)) for number in range(8)]
    with shortage(one, above(20, 3)) as raised:
        answers(one, jobs)
    # 64 tokens halved twice are 16; 8 rows halved twice are 2. 60 tokens of prompt and 30 decoding steps, 8 times.
    assert len(raised) <= 8
    assert one.stats().num_steps > 100


def test_steps_grow_again_with_time(engines: Callable[..., Engine]) -> None:
    one = engines(max_num_batched_tokens=64, max_num_seqs=32)
    small = one._stepping._recovery
    with shortage(one, above(20, 3)):
        answers(one, [Job(prompt(number, 60), greedy(40)) for number in range(8)])
    assert 4 <= small.tokens <= 20
    assert 2 <= small.rows <= 3
    small._patience, small._good, rows = 6, 0, small.rows
    sizes = []
    with watching(one) as plans:
        answers(one, [Job(prompt(20, 60), greedy(40))] * 6, between=lambda _: sizes.append(small.rows))
    assert sorted(set(sizes))[:3] == [rows, 2 * rows, 4 * rows]
    assert max(plan.num_rows for plan in plans) == 6
    assert small.tokens == small.rows == recovery._UNBOUNDED


def test_patience_grows_by_steps_not_by_their_parts(engines: Callable[..., Engine]) -> None:
    """And is forgotten once steps may be as large as ever."""
    one = engines(max_num_batched_tokens=64)
    small, least = one._stepping._recovery, recovery._PATIENCE
    with shortage(one, above(10)) as raised:
        answers(one, [Job(prompt(1, 60), greedy(1))])
    assert len(raised) > 2
    assert small._patience == 2 * least
    small.rows = small_enough = 4
    with shortage(one, above(1000, 1)) as raised:  # the step of 8 rows is divided untried: its parts are what fails
        answers(one, [Job([3], greedy(1))] * 8)
    assert all(plan.num_rows <= small_enough for plan in raised)
    assert raised
    assert small._patience == 4 * least
    small._patience, small._good = 2, 0
    answers(one, [Job(prompt(20, 9), greedy(40))])
    assert small.tokens == small.rows == recovery._UNBOUNDED
    assert small._patience == least


def test_only_what_cannot_be_smaller_fails(engines: Callable[..., Engine]) -> None:
    """Of two requests not even one token can be computed, of one of them only later."""
    one = engines()
    expected = answers(one, JOBS)

    def impossible(plan: StepPlan) -> bool:
        first = (plan.positions == 0) & (plan.token_ids == POISON)
        return bool(first.any()) or size(plan) > 30 or int(plan.positions.max()) >= 75

    bad = [Job([POISON, *prompt(41, 20)], beams(3)), Job(prompt(42, 70), sampled(1, n=2))]
    with shortage(one, impossible) as raised:
        found = answers(one, [*bad, *JOBS])
    for output in found[:2]:
        assert {answer.finish_reason for answer in output.outputs} == {"error"}
        assert f"OutOfMemoryError: {MESSAGE}" in str(output.error)
    assert [len(answer.token_ids) for answer in found[1].outputs] == [75 - 70 + 1] * 2
    assert [tokens_of(output) for output in found[2:]] == [tokens_of(output) for output in expected]
    assert any(plan.num_tokens == 1 for plan in raised)


def test_beside_a_request_that_fails_otherwise(engines: Callable[..., Engine]) -> None:
    """Taken apart for its sake, a step has parts that lack memory."""
    one = engines()
    expected = answers(one, JOBS)
    with shortage(one, above(20)):
        limited = one.runner.launch

        def poisoned(plan: StepPlan) -> LateStep:
            if ((plan.positions == 0) & (plan.token_ids == POISON)).any():
                raise RuntimeError("the poison was computed")
            return limited(plan)

        one.runner.launch = poisoned  # type: ignore[method-assign]
        found = answers(one, [Job([POISON, 3], greedy()), *JOBS])
        one.runner.launch = limited  # type: ignore[method-assign]
    assert "the poison was computed" in str(found[0].error)
    assert [tokens_of(output) for output in found[1:]] == [tokens_of(output) for output in expected]


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_without_any_memory_says_so(ahead: bool, engines: Callable[..., Engine]) -> None:
    one = engines(async_scheduling=ahead)
    for number, job in enumerate(JOBS[:3]):
        add(one, str(number), job)
    with (
        shortage(one, lambda plan: True),
        pytest.raises(EngineDeadError, match=r"steps can no longer .* CUDA out of memory"),
    ):
        finish(one)


def test_what_is_said_of_it(engines: Callable[..., Engine], caplog: pytest.LogCaptureFixture) -> None:
    one = engines()
    with shortage(one, above(20)), caplog.at_level(logging.WARNING, "octavo.engine"):
        answers(one, [Job(prompt(1, 39), greedy(2))])
    (record,) = caplog.records
    for part in ("39 tokens in 1 rows", MESSAGE, "--max-num-batched-tokens", "--max-num-seqs"):
        assert part in record.getMessage()


def test_copies_are_made_one_by_one_where_memory_is_short(engines: Callable[..., Engine]) -> None:
    plain, one = engines(enable_prefix_caching=False), engines(enable_prefix_caching=False)
    copy_pages, cut = one.runner.cache.copy_pages, 0

    def limited(copies: np.ndarray) -> None:
        nonlocal cut
        if len(copies) > 1:
            cut += 1
            raise torch.OutOfMemoryError(MESSAGE)
        copy_pages(copies)

    one.runner.cache.copy_pages = limited  # type: ignore[method-assign]
    with shortage(one, lambda plan: len(plan.copies) > 1):
        assert answers(one, JOBS) == answers(plain, JOBS)
    assert cut > 3


def test_a_state_that_was_sent_in_part(engines: Callable[..., Engine]) -> None:
    """Steps read a state that the device keeps, and of which it is sent what changed."""
    plain, one = engines(block_size=4), engines(block_size=4)
    one.runner.use_graphs(32, eager)
    graphs, rng, broken = one.runner.graphs, random.Random(1), 0
    assert graphs is not None
    replay, send = graphs.run, graphs.state._sender.send

    def interrupted(places: Int32, values: Int32) -> None:
        send(places[::2], values[::2])
        raise torch.OutOfMemoryError(MESSAGE)

    def run_graph(plan: StepPlan, *others: Any) -> torch.Tensor:
        nonlocal broken
        breaks = plan.num_rows > 1 and rng.random() < 0.3
        broken += breaks
        graphs.state._sender.send = interrupted if breaks else send  # type: ignore[method-assign]
        return replay(plan, *others)

    graphs.run = run_graph  # type: ignore[method-assign]
    with forgetful():
        assert answers(one, JOBS) == answers(plain, JOBS)
    assert broken > 5
    assert graphs.num_replayed > 10


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("make", [lambda: above(30, 3), lambda: at_times(3, 0.7)], ids=["30x3", "times"])
def test_encoder_inputs(name: str, make: Callable[[], Fault], tmp_path: Path) -> None:
    """An input cannot be cut, and is encoded with one token of its request at last; some requests share theirs."""
    make_seq2seq_checkpoint(SHAPES[name], tmp_path)
    inputs = [random_prompt(SHAPES[name].vocab, seed, length) for seed, length in ((1, 1), (2, 3), (3, 17), (4, 28))]
    jobs = [
        Job(tokens, params)
        for number, tokens in enumerate(inputs)
        for params in (greedy(12), beams(4, 8, length_penalty=0.8), sampled(number, 9, n=3))
    ]
    settings: dict[str, Any] = {"block_size": 4, "max_model_len": 100}
    plain, one = make_engine(tmp_path, **settings), make_engine(tmp_path, **settings)
    with shortage(one, make()) as raised:
        assert list(map(tokens_of, answers(one, jobs))) == list(map(tokens_of, answers(plain, jobs)))
    assert any(plan.encoder is not None for plan in raised)
    plain.close()
    one.close()


def test_inputs_that_are_pooled(engines: Callable[..., Engine]) -> None:
    """By a decoder, in chunks."""
    plain, one = engines(), engines()
    jobs = [(prompt(number, 7 * number + 1), PoolingParams(task="embed")) for number in range(7)]

    def pooled(engine: Engine) -> list[Any]:
        for number, (tokens, params) in enumerate(jobs):
            engine.add_request(str(number), tokens, params)
        outputs = finish(engine)
        return [outputs[str(number)].pooled for number in range(len(jobs))]

    expected = pooled(plain)
    with shortage(one, above(10)) as raised:
        for found, wanted in zip(pooled(one), expected, strict=True):
            np.testing.assert_allclose(found.values(), wanted.values(), rtol=1e-6)
    assert len(raised) > 1
    check_idle(one)
