"""Encoder-decoder requests answer the same whatever happens to their pages; each test sees to it that it did happen.

Encoder runs and what they leave are counted: one run per distinct input, unless its pages were evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import random_prompt
from support.driving import (
    BOTH_DEPTHS,
    Job,
    Strikes,
    Tokens,
    beam_rows,
    check_idle,
    make_engine,
    other_rows,
    run,
    run_alone,
    watching,
)
from support.everyday import everyday
from support.jobs import beams, greedy, sampled
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES

from engine import Engine

NAMES = ("t5", "bart", "m2m100", "umt5", "blenderbot-small", "switch-experts-few-places-apart")
VOCAB = SHAPES["t5"].vocab
INPUTS = [random_prompt(VOCAB, seed, length) for seed, length in ((1, 1), (2, 3), (3, 17), (4, 40), (5, 61))]
JOBS = [
    Job(tokens, params)
    for number, tokens in enumerate(INPUTS)
    for params in (greedy(20), beams(4, 10, length_penalty=0.8), sampled(number, 14, n=3))
]


@pytest.fixture(scope="module", params=everyday(NAMES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_seq2seq_checkpoint(SHAPES[request.param], path)
    return path


@pytest.fixture
def engines(folder: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []
    common = {"block_size": 4, "max_model_len": 100} | getattr(request, "param", {})

    def make(**settings: Any) -> Engine:
        made.append(make_engine(folder, **(common | settings)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[Tokens]:
    """What each job answers alone in a roomy engine, nothing cached."""
    plain = make_engine(folder, block_size=4, max_model_len=100, enable_prefix_caching=False)
    result = run_alone(plain, JOBS)
    stats = plain.stats()
    assert (stats.num_encoder_runs, stats.num_encoder_hits, stats.num_preemptions) == (len(JOBS), 0, 0)
    plain.close()
    return result


@BOTH_DEPTHS
def test_one_run_per_distinct_input(engines: Callable[..., Engine], answers: list[Tokens]) -> None:
    """All in one batch: encoder inputs ragged beside decoding rows, and found by requests that have the same one."""
    one = engines()
    with watching(one) as plans:
        assert run(one, JOBS) == answers
        assert run(one, JOBS) == answers
    assert one.stats().num_encoder_runs == len(INPUTS)
    assert one.stats().num_encoder_hits == 2 * len(JOBS) - len(INPUTS)
    encoded = [plan.encoder for plan in plans if plan.encoder is not None]
    assert sum(len(batch.token_ids) for batch in encoded) == sum(map(len, INPUTS)), "nothing is padded"
    assert sum(1 for plan in plans if beam_rows(plan) and other_rows(plan)) >= 5


@BOTH_DEPTHS
def test_inputs_arrive_beside_decoding_rows(engines: Callable[..., Engine], answers: list[Tokens]) -> None:
    """A step holds so few tokens that inputs wait for each other; no answer changes."""
    one = engines(max_num_batched_tokens=64, max_num_seqs=16)
    with watching(one) as plans:
        assert run(one, JOBS) == answers
    mixed = [plan for plan in plans if plan.encoder is not None and plan.num_rows > 8]
    assert mixed
    assert len([plan for plan in plans if plan.encoder is not None]) > 2
    assert one.stats().num_encoder_runs == len(INPUTS)


def test_all_beams_read_the_same_pages(engines: Callable[..., Engine]) -> None:
    """An input of 61 tokens is held once, for one beam as for eight."""
    held = {}
    for count in (2, 8):
        one = engines(enable_prefix_caching=False)
        run(one, [Job(INPUTS[4], beams(count, 9, ignore_eos=True))])
        held[count] = one.stats().peak_pages_held
        assert one.stats().num_encoder_runs == 1
    pages = -(-61 // 4)
    # Beyond the input, each beam has at most three pages of its own.
    assert pages < held[2] <= pages + 2 * 3
    assert held[2] < held[8] <= pages + 8 * 3


@BOTH_DEPTHS
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
def test_preempted_after_every_third_step(caching: bool, engines: Callable[..., Engine], answers: list[Tokens]) -> None:
    """With room for all pages, the encoder never runs again: what it left is found by the request itself."""
    one = engines(enable_prefix_caching=caching)
    strike = Strikes(one, 3, 2)
    assert run(one, JOBS, strike) == answers
    stats = one.stats()
    assert stats.num_preemptions == strike.count > len(JOBS)
    assert stats.num_encoder_runs == (len(INPUTS) if caching else len(JOBS))
    assert stats.num_encoder_hits >= strike.count
    assert caching or stats.pages_cached == 0, "without prefix caching nothing outlives its request"


@BOTH_DEPTHS
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "recomputed"])
def test_evicted_inputs_are_encoded_again(caching: bool, engines: Callable[..., Engine], answers: list[Tokens]) -> None:
    """A pool too small for all: the scheduler's own preemptions, and pages that are gone when it comes to resuming."""
    one = engines(num_gpu_blocks_override=45, enable_prefix_caching=caching)
    for _ in range(2):
        assert run(one, JOBS) == answers
    stats = one.stats()
    assert stats.num_preemptions > 3
    assert stats.num_page_copies > 0
    assert stats.num_encoder_runs > (len(INPUTS) if caching else 2 * len(JOBS))
    assert stats.peak_pages_held <= 45
    check_idle(one)


@BOTH_DEPTHS
def test_aborted_requests_leave_nothing_held(engines: Callable[..., Engine], answers: list[Tokens]) -> None:
    """Some of those that share an input go in the middle; the others go on as if alone."""
    one = engines()
    for number, job in enumerate(JOBS):
        one.add_request(str(number), list(job.prompt), job.params)
    outputs = {}
    for step in range(500):
        if step == 4:
            for number in range(0, len(JOBS), 2):
                one.abort_request(str(number))
        if not one.has_unfinished_requests():
            break
        outputs |= {output.request_id: output for output in one.step()}
        one.check_integrity()
    for number in range(1, len(JOBS), 2):
        assert [choice.token_ids for choice in outputs[str(number)].outputs] == answers[number]
    assert one.stats().num_aborted == len(range(0, len(JOBS), 2))
    check_idle(one)


def test_a_salt_separates_inputs(engines: Callable[..., Engine], answers: list[Tokens]) -> None:
    one = engines()
    for salt in ("a", "b", "a"):
        job = Job(JOBS[9].prompt, JOBS[9].params, {"cache_salt": salt})
        assert run(one, [job]) == [answers[9]]
    assert (one.stats().num_encoder_runs, one.stats().num_encoder_hits) == (2, 1)
