"""Constraints: what they allow comes, and their state is that of their sequence, whatever happens to it on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.driving import BOTH_DEPTHS, Job, add, finish, preempt_all, run, run_alone, tokens_of
from support.jobs import MIXED, VOCAB, beams, greedy, prompt, sampled
from test_isolation import faults

from engine import Engine, InvalidRequestError, SamplingParams
from engine.execution.model_kinds import ModelKind
from engine.interface import generation as resolving
from engine.interface.constraints import AllowedTokens, Constraint, allow
from engine.interface.sampling_table import mask_words
from engine.process.runner import ProcessExecutor
from engine.scheduling.plan import StepPlan

ALLOWED = [5, 17, 31, 32, 33, 64, 100, 255]


class Counting:
    """What may come depends on all tokens before; after `limit` of them nothing may.

    Attributes:
        seen: the tokens that it was given.
    """

    def __init__(self, ids: tuple[int, ...], vocab_size: int, seen: tuple[int, ...] = ()):
        self.limit, self.vocab_size, self.seen = ids[0], vocab_size, list(seen)
        self.ids = ids

    @property
    def is_complete(self) -> bool:
        return len(self.seen) >= self.limit

    def accept(self, token: int) -> None:
        assert token in allowed_after(self.seen, self.vocab_size)
        self.seen.append(token)

    def fill(self, mask_row: np.ndarray) -> None:
        assert not self.is_complete
        assert mask_row.shape == (mask_words(self.vocab_size),)
        assert not mask_row.any()
        allow(mask_row, allowed_after(self.seen, self.vocab_size))

    def fork(self) -> Counting:
        return Counting(self.ids, self.vocab_size, tuple(self.seen))


def allowed_after(seen: list[int], vocabulary: int) -> set[int]:
    """Every seventh token, from a place on that the tokens before decide."""
    return set(range(4 + (sum(seen) + len(seen)) % 7, vocabulary, 7))


JOBS = [
    Job(prompt(1, 19), greedy(20, allowed_token_ids=[40], logit_bias={9: 3.0})),
    Job(prompt(2, 3), sampled(5, 18, allowed_token_ids=[40], n=3, top_p=0.9)),
    Job(prompt(3, 41), sampled(6, 30, allowed_token_ids=[9], ignore_eos=False)),
    Job(prompt(4, 8), beams(4, 14, allowed_token_ids=[40], no_repeat_ngram_size=2)),
    Job(prompt(5, 12), beams(3, 16, allowed_token_ids=[6], repetition_penalty=1.3)),
    Job(prompt(6, 22), greedy(12, allowed_token_ids=[40], presence_penalty=0.7, logprobs=2)),
]
BESIDE = [*JOBS, *MIXED[:4], MIXED[6]]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """`allowed_token_ids` asks for `Counting`, its only id being the limit."""
    monkeypatch.setattr(resolving, "AllowedTokens", lambda ids, vocabulary: Counting(tuple(ids), vocabulary))


def check_states(engine: Engine) -> int:
    """Every constraint has seen the answer of its sequence, and belongs to that alone; how many there are."""
    found: list[Constraint] = []
    for group in engine.scheduler.groups():
        for sequence in group.sequences:
            if group.request.decoding.constraint is None:
                assert sequence.constraint is None
                continue
            assert isinstance(sequence.constraint, Counting)
            eos = group.request.decoding.eos_ids  # is never fed, even where it ends nothing
            assert sequence.constraint.seen == [token for token in sequence.output() if token not in eos]
            found.append(sequence.constraint)
        assert not isinstance(group.request.decoding.constraint, Counting) or not group.request.decoding.constraint.seen
    assert len({id(constraint) for constraint in found}) == len(found)
    return len(found)


def check_answers(jobs: list[Job], answers: list[list[list[int]]], eos: frozenset[int]) -> None:
    """Each token was allowed when it came; complete answers end."""
    for job, texts in zip(jobs, answers, strict=True):
        if job.params.allowed_token_ids is None:
            continue
        (limit,) = job.params.allowed_token_ids
        for text in texts:
            seen: list[int] = []
            for token in text:
                assert token in (eos if len(seen) >= limit else allowed_after(seen, VOCAB))
                seen += [] if token in eos else [token]
            if not job.params.ignore_eos:
                assert len(text) <= limit + 1


@pytest.mark.slow
@BOTH_DEPTHS
def test_states_follow_their_sequences(counting: None, engines: Callable[..., Engine]) -> None:
    """Sampled, n, beams, beside others and alone; with chunks of prompts, preemptions and steps that fail."""
    one = engines(enable_prefix_caching=False, max_num_batched_tokens=24, max_num_seqs=24)
    expected = run_alone(one, BESIDE)
    check_answers(BESIDE, expected, one.defaults.eos_ids)
    assert any(len(text) == 10 for text in expected[2])
    states = preempted = calls = 0

    def between(step: int) -> None:
        nonlocal states, preempted
        states += check_states(one)
        if step % 5 == 3:
            preempted += preempt_all(one)
            states += check_states(one)

    assert run(one, BESIDE, between) == expected
    assert states > 50
    assert preempted > 10

    def fail(plan: StepPlan) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 1 and plan.num_rows > 4:
            raise RuntimeError("made by the test")

    with faults(one, fail) as raised:
        found = run(one, BESIDE, lambda step: check_states(one) and None)
    assert found == expected
    assert len(raised) > 3


def test_rows_with_a_constraint_do_not_run_ahead(counting: None, engines: Callable[..., Engine]) -> None:
    one = engines(async_scheduling=True)
    run(one, [JOBS[0]])
    assert one.stats().num_steps_ahead == 0
    run(one, [JOBS[0], Job(prompt(8, 5), greedy(25))])
    assert one.stats().num_steps_ahead > 5


@pytest.mark.slow
def test_masks_are_filled_when_the_forward_pass_has_begun(
    counting: None, engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here behind it, since a CPU does nothing meanwhile; with a runner in another process while that computes."""
    said: list[str] = []
    hidden, fill = ModelKind.run, Counting.fill

    def computing(self: ModelKind, plan: StepPlan, *others: Any) -> torch.Tensor:
        said.append("forward")
        return hidden(self, plan, *others)

    def filling(self: Counting, mask_row: np.ndarray) -> None:
        waiting = isinstance(one.executor, ProcessExecutor) and len(one.executor._expected)
        said.append(f"fill beside {waiting}" if waiting else "fill")
        fill(self, mask_row)

    monkeypatch.setattr(ModelKind, "run", computing)
    monkeypatch.setattr(Counting, "fill", filling)
    one = engines()
    said.clear()
    expected = run(one, JOBS[:2])
    assert said[:4] == ["forward", "fill", "fill", "forward"]
    said.clear()
    one = engines(distributed_executor_backend="mp")
    assert run(one, JOBS[:2]) == expected
    assert set(said) == {"fill beside 1"}

    failed = []

    def fail(plan: StepPlan) -> None:
        if not failed and plan.sampling is not None and len(plan.sampling.masked) > 1:
            failed.append(plan)
            raise RuntimeError("made by the test")

    monkeypatch.setattr(
        Counting, "fill", lambda self, mask_row: fail(one.scheduler.in_flight.newest.plan) or fill(self, mask_row)
    )
    assert run(one, JOBS[:2]) == expected  # the runner does not wait for masks that do not come
    assert failed


def test_memory_that_is_short(counting: None, engines: Callable[..., Engine]) -> None:
    """Steps are computed in parts: constraints hear of each token once."""
    one = engines()
    expected = run_alone(one, BESIDE)

    def short(plan: StepPlan) -> None:
        if plan.num_rows > 5:
            raise MemoryError("made by the test")

    with faults(one, short) as raised:
        assert run(one, BESIDE, lambda step: check_states(one) and None) == expected
    assert raised


def test_forced_tokens_come_whatever_is_allowed(counting: None, engines: Callable[..., Engine]) -> None:
    """The constraint hears of none of them: what it allows begins behind the first one."""
    forced = {"forced_bos_token_id": 3, "forced_eos_token_id": 2, "allowed_token_ids": [40]}
    assert 3 not in allowed_after([], VOCAB)
    one = engines()
    for params in (greedy(8, **forced), sampled(3, 8, **forced), beams(3, 8, ignore_eos=True, **forced)):
        for text in run(one, [Job([7], params)])[0]:
            assert (text[0], text[-1], len(text)) == (3, 2, 8)
            seen: list[int] = []
            for token in text[1:-1]:
                assert token in allowed_after(seen, VOCAB)
                seen += [] if token in one.defaults.eos_ids else [token]


@BOTH_DEPTHS
def test_a_complete_answer_ends_whatever_its_least_length(counting: None, engines: Callable[..., Engine]) -> None:
    """Nothing but its end is allowed then, which is not banned besides."""
    one = engines()
    for more in ({"min_tokens": 9}, {"min_length": 30}, {"min_tokens": 9, "stop_token_ids": [3]}):
        for params in (greedy(12, ignore_eos=False), sampled(4, 12, ignore_eos=False, n=2), beams(3, 12)):
            add(one, "r", Job(prompt(9, 7), replace(params, allowed_token_ids=[6], **more)))
            (output,) = finish(one).values()
            for answer in output.outputs:
                assert answer.finish_reason == "stop", answer.stop_reason
                assert len([token for token in answer.token_ids if token not in {*one.defaults.eos_ids, 3}]) == 6


# ------------------------------------------------------------------ allowed_token_ids


def suppressed(params: SamplingParams, vocabulary: int) -> SamplingParams:
    """The same, said by the tokens that may not come."""
    allowed = set(params.allowed_token_ids or ())
    others = [token for token in range(vocabulary) if token not in allowed]
    return replace(params, allowed_token_ids=None, suppress_tokens=others)


@BOTH_DEPTHS
def test_allowed_tokens_are_all_that_come(engines: Callable[..., Engine]) -> None:
    """Greedy, sampled, n and beams: as if all other tokens were suppressed."""
    one = engines()
    eos = min(one.defaults.eos_ids)
    ids = [*ALLOWED, eos]
    jobs = [
        Job(prompt(1, 9), greedy(12, allowed_token_ids=ALLOWED)),
        Job(prompt(2, 9), sampled(1, 12, allowed_token_ids=ALLOWED, n=3, temperature=1.4)),
        Job(prompt(3, 9), sampled(2, 12, allowed_token_ids=ids, ignore_eos=False, top_k=3)),
        Job(prompt(4, 9), beams(4, 8, allowed_token_ids=ALLOWED)),
        Job(prompt(5, 9), beams(3, 8, allowed_token_ids=ids, repetition_penalty=1.2, min_tokens=3)),
        Job(prompt(6, 9), greedy(12, allowed_token_ids=ALLOWED, bad_words_ids=[[5], [17, 31]], logit_bias={64: 4.0})),
    ]
    answers = run(one, jobs)
    for job, texts in zip(jobs, answers, strict=True):
        assert {token for text in texts for token in text} <= set(job.params.allowed_token_ids or ())
    assert all(len(text) == 12 for text in answers[0] + answers[1])
    assert 1024 + len(ALLOWED) >= VOCAB
    assert run(one, [Job(job.prompt, suppressed(job.params, VOCAB)) for job in jobs]) == answers


def test_the_answer_ends_where_its_end_is_allowed(engines: Callable[..., Engine]) -> None:
    """As in vLLM: EOS is a token like others, which comes if it is listed; a stop id, too."""
    one = engines()
    eos = min(one.defaults.eos_ids)
    for number, (ids, more, reason) in enumerate(
        [
            (ALLOWED, {}, "length"),
            ([*ALLOWED, eos], {"logit_bias": {eos: 50.0}}, "stop"),
            (ALLOWED, {"logit_bias": {5: 50.0}, "stop_token_ids": [5]}, "stop"),
        ]
    ):
        add(one, str(number), Job(prompt(7, 5), greedy(6, ignore_eos=False, allowed_token_ids=ids, **more)))
        (output,) = finish(one).values()
        assert output.outputs[0].finish_reason == reason
        assert len(tokens_of(output)[0]) == (6 if reason == "length" else 1)


def test_no_token_is_left(engines: Callable[..., Engine]) -> None:
    """An error of that request alone."""
    one = engines()
    add(one, "bad", Job(prompt(1, 4), greedy(4, allowed_token_ids=[5], suppress_tokens=[5])))
    add(one, "good", Job(prompt(1, 4), greedy(4, allowed_token_ids=[5])))
    outputs = finish(one)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "no token is possible" in str(outputs["bad"].outputs[0].stop_reason)
    assert tokens_of(outputs["good"]) == [[5] * 4]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "allowed_token_ids must hold at least one token id"),
        ([1, "2"], "allowed_token_ids must hold token ids"),
        ([-1], "allowed_token_ids must hold token ids"),
        ([True], "allowed_token_ids must hold token ids"),
        (7, "allowed_token_ids must be a list of token ids, got 7"),
        (list(range(1025)), "allowed_token_ids may have at most 1024 token ids, got 1025"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(ids: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(allowed_token_ids=ids)
    assert caught.value.param == "allowed_token_ids"


def test_ids_outside_the_vocabulary_are_refused(engines: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidRequestError, match=f"allowed_token_ids holds token id {VOCAB}, but the vocabulary has"):
        add(engines(), "r", Job([1], greedy(3, allowed_token_ids=[3, VOCAB])))


def test_packed_words() -> None:
    """Bit t % 32 of word t // 32; ids may repeat, and come in any order."""
    row = np.zeros(mask_words(97), dtype=np.uint32)
    AllowedTokens([96, 0, 31, 32, 31], 97).fill(row)
    assert row.tolist() == [1 | 1 << 31, 1, 0, 1]
    assert mask_words(96) == 3
