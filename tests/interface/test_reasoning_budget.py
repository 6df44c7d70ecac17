"""The limit on reasoning: what must come comes, everything before and behind it is as without a limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.driving import BOTH_DEPTHS, Job, preempt_all, run, run_alone
from support.jobs import MIXED, VOCAB, beams, greedy, prompt, sampled
from test_constraints import Counting, allowed_after
from test_drafts import Oracle, answers, check_same

from engine import Engine, InvalidRequestError, ReasoningBudget, SamplingParams
from engine.interface.reasoning import LimitedReasoning
from engine.interface.sampling_table import mask_words

OPEN, CLOSE, WORDS = 40, 41, (50, 51)
ENDING = [*WORDS, CLOSE]


def budget(tokens: int, **more: Any) -> ReasoningBudget:
    return ReasoningBudget(
        **{"tokens": tokens, "open": (OPEN,), "close": CLOSE, "last_words": WORDS, "begun": True} | more
    )


JOBS = [
    Job(prompt(1, 19), greedy(20, reasoning_budget=budget(6), logprobs=2)),
    Job(prompt(2, 3), sampled(5, 18, reasoning_budget=budget(4), n=3, top_p=0.9)),
    Job(prompt(3, 41), sampled(6, 16, reasoning_budget=budget(0), presence_penalty=0.5)),
    Job(prompt(4, 30), greedy(20, reasoning_budget=budget(6, begun=False), logit_bias={OPEN: 100})),
    Job(prompt(5, 12), greedy(12, reasoning_budget=budget(5), logit_bias={CLOSE: 100})),
    Job(prompt(6, 22), sampled(7, 8, reasoning_budget=budget(7))),
    Job(prompt(7, 9), greedy(14, reasoning_budget=budget(30, begun=False), ignore_eos=False)),
]
BESIDE = [*JOBS, *MIXED[:4], MIXED[6]]


def test_reasoning_ends_where_it_must(engines: Callable[..., Engine]) -> None:
    one = engines()
    limited = run_alone(one, JOBS)
    unlimited = run_alone(one, [Job(job.prompt, _without(job.params)) for job in JOBS])
    first, second = limited[0][0], limited[1]
    assert CLOSE not in unlimited[0][0][:6]
    assert first[:9] == [*unlimited[0][0][:6], *ENDING]
    for text, other in zip(second, unlimited[1], strict=True):
        assert text[:7] == [*other[:4], *ENDING]
    assert len({tuple(text) for text in second}) == 3
    assert limited[2][0][0] == CLOSE  # no reasoning, and no excuse
    assert limited[3][0] == [OPEN, *[OPEN] * 6, *ENDING, *[OPEN, CLOSE] * 5]
    assert limited[4] == unlimited[4]  # the model ends by itself
    assert limited[5][0][:7] == unlimited[5][0][:7]
    assert limited[5][0][7] == WORDS[0]  # max_tokens cuts the last words
    assert limited[6] == unlimited[6]
    # What follows is what follows a prompt of the same tokens.
    going_on = run_alone(one, [Job([*JOBS[0].prompt, *first[:9]], greedy(11))])
    assert first[9:] == going_on[0][0]


def _without(params: SamplingParams) -> SamplingParams:
    return replace(params, reasoning_budget=None)


@BOTH_DEPTHS
def test_nothing_else_changes_an_answer(engines: Callable[..., Engine]) -> None:
    """Others in the batch, chunks, preemptions, prompts that are found in pages, and drafts."""
    one = engines(max_num_batched_tokens=24, max_num_seqs=24)
    expected = run_alone(one, BESIDE)
    preempted = [0]

    def between(step: int) -> None:
        if step % 5 == 3:
            preempted[0] += preempt_all(one)

    assert run(one, BESIDE, between) == expected
    assert preempted[0] > 10
    plain = answers(one, BESIDE)
    before = one.stats()
    oracle = Oracle(plain)
    check_same(answers(one, BESIDE, oracle), plain)
    after = one.stats()
    assert after.num_accepted_draft_tokens - before.num_accepted_draft_tokens > 40


def test_what_must_come_is_one_step(engines: Callable[..., Engine]) -> None:
    one = engines()
    job = Job(prompt(1, 19), greedy(20, reasoning_budget=budget(6)))
    before = one.stats().num_steps
    run(one, [job])
    assert one.stats().num_steps - before == 20 - len(ENDING)  # drafted together, and one more follows


def test_another_constraint_goes_on_beside_it() -> None:
    inner = Counting((9,), VOCAB)
    one = LimitedReasoning(budget(2), VOCAB, inner)
    said: list[int] = []
    for _ in range(2):
        row = np.zeros(mask_words(VOCAB), dtype=np.uint32)
        one.fill(row)
        said.append(min(allowed_after(said, VOCAB)))
        assert [token for token in range(VOCAB) if row[token // 32] >> (token % 32) & 1] == sorted(
            allowed_after(said[:-1], VOCAB)
        )
        one.accept(said[-1])
    assert list(one.forced()) == ENDING
    row = np.zeros(mask_words(VOCAB), dtype=np.uint32)
    fork = one.fork()
    fork.fill(row)
    assert row.sum() == 1 << (WORDS[0] % 32)
    assert fork.inner is not one.inner
    assert not one.is_free
    assert not one.is_complete


def test_a_mark_of_several_tokens_opens() -> None:
    one = LimitedReasoning(budget(1, begun=False, open=(7, 8)), VOCAB)
    for token in (7, 7, 9, 8, 7, 8):
        assert one.is_free
        one.accept(token)
    assert one.is_free
    one.accept(1)
    assert list(one.forced()) == ENDING
    for token in ENDING:
        assert not one.is_free
        one.accept(token)
    assert one.is_free


@pytest.mark.parametrize(
    "params",
    [
        lambda: SamplingParams(reasoning_budget=budget(-1)),
        lambda: SamplingParams(reasoning_budget=budget(1, open=())),
        lambda: SamplingParams(reasoning_budget=5),  # type: ignore[arg-type]
        lambda: beams(2, reasoning_budget=budget(5)),
    ],
)
def test_what_cannot_be_limited_is_refused(params: Callable[[], SamplingParams]) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        params()
    assert refused.value.param == "reasoning_budget"


def test_a_mark_outside_the_vocabulary_is_refused(engines: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidRequestError, match="reasoning_budget"):
        engines().add_request("a", prompt(1, 3), greedy(3, reasoning_budget=budget(1, close=VOCAB)))
