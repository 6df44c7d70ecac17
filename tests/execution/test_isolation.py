"""An exception in a step fails only the requests it belongs to; the others get the tokens of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from support.driving import BOTH_DEPTHS, Job, Tokens, add, check_idle, finish, preempt_all, run, tokens_of
from support.executors import use_torch
from support.jobs import MIXED, beams, greedy, prompt, sampled

from engine import LLM, Engine, EngineDeadError, RequestFailedError
from engine.execution.recovery import join
from engine.scheduling.plan import StepPlan, StepResult, TokenScores

# A step fails that computes this token as the first of a sequence, or any token from this position on. None of MIXED
# does either. The second is reached in the middle of an answer.
POISON, EDGE = 300, 75
BROKEN = [Job([POISON, *prompt(41, 20)], greedy()), Job([POISON], beams(3)), Job(prompt(42, 70), sampled(1, n=2))]
assert all(job.prompt[0] != POISON and len(job.prompt) + 20 < EDGE for job in MIXED)


@contextmanager
def faults(engine: Engine, fault: Callable[[StepPlan], None]) -> Iterator[list[StepPlan]]:
    """Calls `fault` for each plan, in the middle of its forward pass; gives the plans for which it raised."""
    raised: list[StepPlan] = []
    forward = engine.runner.kind.run

    def broken(plan: StepPlan, *others: Any) -> torch.Tensor:
        hidden = forward(plan, *others)  # so that pages are written before it fails
        try:
            fault(plan)
        except BaseException:
            raised.append(plan)
            raise
        return hidden

    engine.runner.kind.run = broken  # type: ignore[method-assign]
    try:
        yield raised
    finally:
        engine.runner.kind.run = forward  # type: ignore[method-assign]


def poisoned(plan: StepPlan) -> np.ndarray:
    """Which tokens of a plan are poison."""
    return ((plan.positions == 0) & (plan.token_ids == POISON)) | (plan.positions >= EDGE)


def poison(plan: StepPlan) -> None:
    if poisoned(plan).any():
        raise RuntimeError("the poison was computed")


@BOTH_DEPTHS
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 12}], ids=["whole", "chunks"])
def test_the_others_do_not_notice(
    settings: dict[str, Any], engines: Callable[..., Engine], mixed_answers: list[Tokens]
) -> None:
    one = engines(**settings)
    for number, job in enumerate([*BROKEN, *MIXED]):
        add(one, str(number), job)
    with faults(one, poison) as raised:
        outputs = finish(one)
    assert len(raised) >= 4, "poisoned requests failed together with others, and alone"
    assert any(plan.num_rows > 2 for plan in raised)
    assert [len(answer.token_ids) for answer in outputs["2"].outputs] == [EDGE - 70 + 1] * 2
    for number in range(len(BROKEN)):
        assert {answer.finish_reason for answer in outputs[str(number)].outputs} == {"error"}
        assert "RuntimeError: the poison" in str(outputs[str(number)].outputs[0].stop_reason)
    assert one.stats().num_finished == len(MIXED)
    assert [tokens_of(outputs[str(len(BROKEN) + number)]) for number in range(len(MIXED))] == mixed_answers


@BOTH_DEPTHS
def test_every_step_may_fail_once(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """Only whole steps fail, never their parts: no request fails. Pages are copied, written
    and preempted meanwhile."""
    one = engines(enable_prefix_caching=False)
    whole: list[StepPlan] = []

    def too_large(plan: StepPlan) -> None:
        if any(plan is one for one in whole):
            raise RuntimeError("made by the test")

    def remembering(schedule: Callable[..., StepPlan | None]) -> Callable[..., StepPlan | None]:
        def remembered(*arguments: Any) -> StepPlan | None:
            plan = schedule(*arguments)
            if plan is not None and len({row.group for row in one.scheduler.in_flight.newest.rows}) > 1:
                whole.append(plan)
            return plan

        return remembered

    one.scheduler.schedule = remembering(one.scheduler.schedule)  # type: ignore[method-assign]
    one.scheduler.schedule_ahead = remembering(one.scheduler.schedule_ahead)  # type: ignore[method-assign]
    with faults(one, too_large) as raised:
        assert run(one, MIXED, between=lambda n: preempt_all(one) if n == 9 else None) == mixed_answers
    assert len(raised) > 15
    assert one.stats().num_page_copies > 30
    assert one.stats().num_preemptions >= 5


@BOTH_DEPTHS
def test_a_failing_copy_fails_its_own_request(engines: Callable[..., Engine]) -> None:
    one = engines(enable_prefix_caching=False)
    jobs = [Job(prompt(50, 21), beams(4)), Job(prompt(51, 21), sampled(3, n=3)), Job(prompt(52, 9), greedy())]
    expected = run(one, jobs)
    for number, job in enumerate(jobs):
        add(one, str(number), job)
    copy_pages, victims = one.runner.cache.copy_pages, set[int]()

    def broken(copies: np.ndarray) -> None:
        copy_pages(copies)
        if not victims and len(copies):
            beam = next(group for group in one.scheduler.groups() if group.beam is not None)
            if len(beam.sequences) > 1:
                victims.update(page for sequence in beam.sequences for page in sequence.table)
        if victims & set(copies[:, 1].tolist()):
            raise RuntimeError("this copy is broken")

    one.runner.cache.copy_pages = broken  # type: ignore[method-assign]
    outputs = finish(one)
    assert victims
    assert {answer.finish_reason for answer in outputs["0"].outputs} == {"error"}
    assert [tokens_of(outputs["1"]), tokens_of(outputs["2"])] == expected[1:]


@BOTH_DEPTHS
def test_a_request_that_fails_alone_leaves_a_working_engine(engines: Callable[..., Engine]) -> None:
    """Twice in a row and with nothing else to do: that is the requests' fault, not the engine's."""
    one = engines()
    expected = run(one, [MIXED[0]])
    for _ in range(2):
        add(one, "bad", BROKEN[0])
        with faults(one, poison) as raised:
            outputs = finish(one)
        assert len(raised) == 1, "there is nothing to take apart"
        assert outputs["bad"].outputs[0].finish_reason == "error"
    assert run(one, [MIXED[0]]) == expected


@BOTH_DEPTHS
def test_an_engine_that_computes_nothing_any_more_says_so(engines: Callable[..., Engine]) -> None:
    """As after an error that a CUDA device does not recover from."""
    one = engines()

    def dead(plan: StepPlan) -> None:
        raise torch.AcceleratorError("CUDA error: made by the test")

    for number, job in enumerate(MIXED[:3]):
        add(one, str(number), job)
    with faults(one, dead), pytest.raises(EngineDeadError, match="AcceleratorError: CUDA error: made by the test"):
        finish(one)
    check_idle(one)


def test_ctrl_c_ends_the_step_and_nothing_else(shared_llm: Callable[[str], LLM]) -> None:
    llm = shared_llm("llama-grouped")
    expected = llm.generate([prompt(60, 9)], greedy(5))[0].outputs[0].token_ids

    def interrupt(plan: StepPlan) -> None:
        raise KeyboardInterrupt

    with faults(llm.engine, interrupt), pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(61, 9)], greedy(5))
    check_idle(llm.engine)
    assert llm.generate([prompt(60, 9)], greedy(5))[0].outputs[0].token_ids == expected


# ---------------------------------------------------------------- output that is not a number


@BOTH_DEPTHS
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_model_that_overflows_fails_the_requests_that_overflow(
    value: float, engines: Callable[..., Engine], mixed_answers: list[Tokens]
) -> None:
    """A request whose token overflows, in the prompt or in the answer; as float16 does for some prompts."""
    one = engines()
    use_torch(one.runner.model)
    layer = one.runner.model.decoder.blocks[0].ffn.inner.down
    compute, forward = layer.forward, one.runner.kind.run
    now: list[StepPlan] = []

    def remember(plan: StepPlan, *others: Any) -> torch.Tensor:
        now[:] = [plan]
        return forward(plan, *others)

    def overflow(x: torch.Tensor) -> torch.Tensor:
        y = compute(x)
        y[: now[0].num_tokens][torch.from_numpy(poisoned(now[0]))] = value
        return y

    one.runner.kind.run = remember  # type: ignore[method-assign]
    layer.forward = overflow  # type: ignore[method-assign]
    broken = [*BROKEN, Job(BROKEN[0].prompt, sampled(1, top_k=5, top_p=0.9)), Job(BROKEN[0].prompt, sampled(2, n=3))]
    broken.append(Job(BROKEN[0].prompt, greedy(3, prompt_logprobs=2)))
    for number, job in enumerate([*broken, *MIXED]):
        add(one, str(number), job)
    outputs = finish(one)
    for number in range(len(broken)):
        assert {answer.finish_reason for answer in outputs[str(number)].outputs} == {"error"}
        assert "not a number" in str(outputs[str(number)].outputs[0].stop_reason)
        assert outputs[str(number)].prompt_logprobs is None
        reached = EDGE - 70 + 1 if number == 2 else 0
        assert all(len(answer.token_ids) == reached for answer in outputs[str(number)].outputs)
    assert [tokens_of(outputs[str(len(broken) + number)]) for number in range(len(MIXED))] == mixed_answers


def test_a_prompt_that_cannot_be_scored(engines: Callable[..., Engine]) -> None:
    """The prompt's log-probabilities overflow, the answer's would not."""
    one = engines()
    logits = one.runner.model.logits

    def overflow(hidden: torch.Tensor, *form: Any) -> torch.Tensor:
        result = logits(hidden, *form)
        if len(hidden) > one.runner.min_rows:  # the prompt's
            result[4] = torch.nan
        return result

    one.runner.model.logits = overflow  # type: ignore[method-assign]
    length = one.runner.min_rows + 9
    add(one, "scored", Job(prompt(70, length), greedy(3, prompt_logprobs=1)))
    add(one, "plain", Job(prompt(70, length), greedy(3)))
    outputs = finish(one)
    assert outputs["scored"].outputs[0].finish_reason == "error"
    assert "not a number" in str(outputs["scored"].outputs[0].stop_reason)
    assert outputs["plain"].outputs[0].finish_reason == "length"


def test_a_broken_checkpoint_fails_with_a_reason(shared_llm: Callable[[str], LLM]) -> None:
    llm = shared_llm("llama-grouped")
    embedding = llm.engine.runner.model.decoder.embedding.tokens.data
    kept = embedding[5].clone()
    embedding[5] = torch.nan
    try:
        with pytest.raises(RequestFailedError, match="not a number"):
            llm.generate([[1, 5, 2]], greedy(3))
        assert len(llm.generate([[1, 2]], greedy(3))[0].outputs[0].token_ids) == 3
    finally:
        embedding[5] = kept


# ---------------------------------------------------------------- the parts' answers under each other


def result(rows: int, width: int, number: int, prompts: int = 0) -> StepResult:
    rng = np.random.default_rng(rows + 10 * width)
    scores = None
    if prompts:
        scores = TokenScores(
            logprobs=rng.random(prompts, np.float32), ranks=np.arange(prompts, dtype=np.int32),
            top_ids=np.ones((prompts, number), np.int32), top_logprobs=rng.random((prompts, number), np.float32),
        )  # fmt: skip
    return StepResult(
        tokens=rng.integers(9, size=(rows, width), dtype=np.int32), scores=rng.random((rows, width), np.float32),
        logprobs=rng.random((rows, width), np.float32), ranks=np.ones((rows, width), np.int32),
        top_ids=np.ones((rows, number), np.int32), top_logprobs=rng.random((rows, number), np.float32),
        prompt_logprobs=scores,
    )  # fmt: skip


def test_join_keeps_every_row() -> None:
    parts = [result(2, 3, 1), result(0, 0, 0), result(1, 8, 5, prompts=4), result(1, 1, 0, prompts=2)]
    whole = join(parts)
    assert whole.tokens.shape == whole.scores.shape == whole.logprobs.shape == whole.ranks.shape == (4, 8)
    assert whole.top_ids.shape == whole.top_logprobs.shape == (4, 5)
    assert whole.tokens.dtype == np.int32
    assert whole.logprobs.dtype == np.float32
    row = 0
    for part in parts:
        for name in ("tokens", "scores", "logprobs", "ranks", "top_ids", "top_logprobs"):
            own = getattr(part, name)
            assert (getattr(whole, name)[row : row + len(own), : own.shape[1]] == own).all()
        row += len(part.tokens)
    assert whole.prompt_logprobs is not None
    assert whole.prompt_logprobs.ranks.tolist() == [0, 1, 2, 3, 0, 1]
    assert whole.prompt_logprobs.top_ids.shape == (6, 5)
    assert join([result(0, 0, 0)]).prompt_logprobs is None
