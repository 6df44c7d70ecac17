"""DRY, XTC, typical_p and top_n_sigma: an answer is the same alone, in a crowd, after preemption, one step ahead, and
whatever is drafted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.driving import BOTH_DEPTHS, Job, Strikes, Tokens, run, run_alone, watching
from support.jobs import beams, greedy, prompt, sampled
from test_drafts import Oracle, answers, check_same

from engine import Engine, SamplingParams

JOBS = [
    Job(prompt(20, 9), sampled(21, typical_p=0.5)),
    Job(prompt(21, 30), sampled(22, top_n_sigma=1.0, temperature=1.5, n=2)),
    Job(prompt(22, 4), sampled(23, 30, xtc_probability=0.5, xtc_threshold=0.01, n=3)),
    Job(prompt(23, 17), sampled(24, xtc_probability=0.7, xtc_threshold=0.02, top_k=20, presence_penalty=0.5)),
    Job(prompt(24, 6) * 4, greedy(30, dry_multiplier=1.5, dry_allowed_length=1, dry_sequence_breakers=[])),
    Job(
        prompt(25, 8) * 3,
        sampled(26, 30, dry_multiplier=4.0, dry_allowed_length=1, dry_sequence_breakers=[], n=2, temperature=0.3),
    ),
    Job(prompt(26, 6) * 3, beams(3, dry_multiplier=4.0, dry_allowed_length=0, dry_sequence_breakers=[])),
    Job(
        prompt(27, 6) * 3,
        sampled(
            27, 24, dry_multiplier=1.0, dry_allowed_length=0, dry_penalty_last_n=12, dry_sequence_breakers=[],
            typical_p=0.9, xtc_probability=0.3, xtc_threshold=0.01, repetition_penalty=1.1,
        ),
    ),
]  # fmt: skip
OFF = dict.fromkeys(("typical_p", "top_n_sigma", "xtc_probability", "dry_multiplier"))


@pytest.fixture(scope="module")
def alone(plain_answers: Callable[[list[Job]], list[Tokens]]) -> list[Tokens]:
    return plain_answers(JOBS)


@pytest.fixture(scope="module")
def plain_answers(checkpoint_path: str) -> Callable[[list[Job]], list[Tokens]]:
    from support.driving import make_engine

    def get(jobs: list[Job]) -> list[Tokens]:
        one = make_engine(checkpoint_path, enable_prefix_caching=False)
        try:
            return run_alone(one, jobs)
        finally:
            one.close()

    return get


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    from support.checkpoints import make_checkpoint
    from support.jobs import CHECKPOINT

    return str(make_checkpoint(CHECKPOINT, tmp_path_factory.mktemp("filters")).path)


def test_each_changes_its_answers(alone: list[Tokens], plain_answers: Callable[[list[Job]], list[Tokens]]) -> None:
    plain = plain_answers([Job(job.prompt, replace(job.params, **OFF)) for job in JOBS])
    assert [number for number, (one, other) in enumerate(zip(alone, plain, strict=True)) if one == other] == []


@BOTH_DEPTHS
def test_in_a_crowd_and_preempted(engines: Callable[..., Engine], alone: list[Tokens]) -> None:
    one = engines(block_size=4, max_num_batched_tokens=64)
    assert run(one, JOBS) == alone
    strike = Strikes(one, 3, 2)
    assert run(one, JOBS, strike) == alone
    assert strike.count > 2 * len(JOBS)


@pytest.mark.parametrize(("number", "runs_ahead"), [(0, True), (1, True), (2, True), (4, False), (7, False)])
def test_what_heeds_no_tokens_runs_ahead(
    number: int, runs_ahead: bool, engines: Callable[..., Engine], alone: list[Tokens]
) -> None:
    """DRY waits for each token, as penalties do."""
    one = engines(async_scheduling=True)
    with watching(one) as plans:
        assert run(one, [JOBS[number]]) == [alone[number]]
    assert any(plan.sources is not None for plan in plans) == runs_ahead


@BOTH_DEPTHS
def test_whatever_is_drafted(engines: Callable[..., Engine]) -> None:
    one = engines()
    plain = answers(one, JOBS)
    check_same(answers(one, JOBS, Oracle(plain)), plain)


def test_defaults_change_nothing(plain_answers: Callable[[list[Job]], list[Tokens]]) -> None:
    neutral = SamplingParams(
        typical_p=1.0, top_n_sigma=-1, xtc_probability=0.0, xtc_threshold=0.01, dry_multiplier=0.0, dry_base=3.0,
        temperature=1.0, seed=3, max_tokens=12,
    )  # fmt: skip
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=12)
    found = plain_answers([Job(prompt(30, 5) * 3, params) for params in (neutral, plain)])
    assert found[0] == found[1]
