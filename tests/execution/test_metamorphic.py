"""The same answer whatever happens on the way; each test sees to it that it did happen.

Batches, chunks, arrivals, departures and streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from support.driving import (
    BOTH_DEPTHS,
    Job,
    Tokens,
    add,
    beam_rows,
    check_idle,
    check_pages,
    finish,
    other_rows,
    run,
    run_alone,
    tokens_of,
    watching,
)
from support.jobs import MIXED, beams, greedy, prompt, sampled

from engine import Engine, InvalidRequestError, RequestDelta, SamplingParams

# ------------------------------------------------------------------ batches and chunks


@BOTH_DEPTHS
def test_batched_equals_alone(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """All kinds of decoding in one batch, and beams share execute calls with the other rows."""
    one = engines()
    with watching(one) as plans:
        assert run(one, MIXED) == mixed_answers
    assert max(plan.num_rows for plan in plans) > len(MIXED)
    assert sum(1 for plan in plans if beam_rows(plan) and other_rows(plan)) >= 10


@BOTH_DEPTHS
def test_any_order_and_company(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """Reversed, doubled, and through a step that holds only a few sequences."""
    one = engines(max_num_seqs=5, enable_prefix_caching=False)
    jobs = [*reversed(MIXED), *MIXED]
    with watching(one) as plans:
        assert run(one, jobs) == [*reversed(mixed_answers), *mixed_answers]
    assert max(plan.num_rows for plan in plans) <= 5


@BOTH_DEPTHS
@pytest.mark.parametrize("budget", [4, 7])
def test_chunked_equals_whole(budget: int, engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """Prompts in chunks of at most the step's budget."""
    one = engines(max_num_batched_tokens=budget, max_num_seqs=4, enable_prefix_caching=False)
    with watching(one) as plans:
        assert run(one, MIXED) == mixed_answers
    assert max(plan.num_tokens for plan in plans) <= budget
    assert sum(1 for plan in plans if plan.sampling is None or len(plan.sampling.rows) < plan.num_rows) >= 8


def test_seeds_alone_and_in_any_batch(engines: Callable[..., Engine]) -> None:
    """Many seeds, every filter: the same tokens alone and among 40 others, and different ones per seed."""
    filters: list[dict[str, Any]] = [
        {},
        {"top_k": 20},
        {"top_p": 0.9},
        {"min_p": 0.02},
        {"temperature": 1.4, "repetition_penalty": 1.2},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "presence_penalty": 0.5},
    ]
    jobs = [
        Job(prompt(20, 10), sampled(100 + seed, 12, n=1 + seed % 2, **chosen))
        for seed in range(7)
        for chosen in filters
    ]
    one = engines(enable_prefix_caching=False)
    alone = run_alone(one, jobs)
    with watching(one) as plans:
        assert run(one, jobs) == alone
    assert max(plan.num_rows for plan in plans) > 40
    plain = [answer for job, answer in zip(jobs, alone, strict=True) if job.params.top_k is None]
    assert len({str(answer) for answer in plain}) > len(plain) * 0.9


def test_without_a_seed(engines: Callable[..., Engine]) -> None:
    """A request without a seed gets one of its own; the engine's seed makes a run repeatable."""
    jobs = [Job(prompt(21, 6), SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True))] * 4
    first = run(engines(seed=1), jobs)
    assert len({str(answer) for answer in first}) == 4
    assert run(engines(seed=1), jobs) == first
    assert run(engines(seed=2), jobs) != first


def test_one_beam_is_greedy(engines: Callable[..., Engine]) -> None:
    """num_beams=1 is no beam search."""
    one = engines()
    jobs = [Job(prompt(seed, 9), greedy(ignore_eos=False, num_beams=count)) for seed in range(8) for count in (None, 1)]
    with watching(one) as plans:
        result = run(one, jobs)
    assert result[::2] == result[1::2]
    assert not any(beam_rows(plan) for plan in plans)


@pytest.mark.parametrize("wrong", ["text", [], [1, "a"], [[1, 2]], [True], [1.0], [307], [-1], 5, None, iter([1])])
def test_impossible_prompts(wrong: Any, engines: Callable[..., Engine]) -> None:
    """What is no list of token ids is refused, and nothing is queued."""
    one = engines()
    with pytest.raises(InvalidRequestError):
        one.add_request("x", wrong, greedy())
    check_idle(one)


# ------------------------------------------------------------------ arrivals


def test_arrivals_join_the_next_step(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """A request that comes in mid-generation is in the very next step, and no answer changes."""
    one = engines(enable_prefix_caching=False)
    outputs = {}
    with watching(one) as plans:
        for number, job in enumerate(MIXED):
            add(one, str(number), job)
            rows_before = plans[-1].num_rows if plans else 0
            for output in one.step():
                outputs[output.request_id] = output
            assert one.stats().num_waiting == 0
            assert plans[-1].num_tokens >= len(job.prompt)
            assert (plans[-1].query_start[1:] - plans[-1].query_start[:-1]).max() == len(job.prompt)
            assert rows_before == 0 or plans[-1].num_rows > 1
    outputs |= finish(one)
    assert [tokens_of(outputs[str(number)]) for number in range(len(MIXED))] == mixed_answers


def test_priorities(engines: Callable[..., Engine]) -> None:
    """The lower number runs first, evicting others if rows are short; ties go by arrival."""
    one = engines(max_num_seqs=2)
    order: list[str] = []
    for name, priority in (("a", 5), ("b", 5), ("c", 5), ("d", 1), ("e", -3)):
        add(one, name, Job(prompt(30, 5), greedy(6), {"priority": priority}))
    while one.has_unfinished_requests():
        order += [output.request_id for output in one.step() if output.finished]
    assert set(order[:2]) == {"d", "e"}  # they ran together
    assert order[2:] == ["a", "b", "c"]
    check_idle(one)

    expected = run(one, [Job(prompt(31, 9), greedy(12)), Job(prompt(32, 9), greedy(12))])
    before = one.stats().num_preemptions
    add(one, "low", Job(prompt(31, 9), greedy(12), {"priority": 9}))
    add(one, "other", Job(prompt(33, 9), greedy(12), {"priority": 8}))
    one.step()
    assert one.stats().num_running == 2
    add(one, "high", Job(prompt(32, 9), greedy(12), {"priority": -1}))
    outputs = {output.request_id: output for output in one.step()}
    assert "high" in outputs
    assert one.stats().num_preemptions == before + 1
    outputs |= finish(one)
    assert [tokens_of(outputs["low"]), tokens_of(outputs["high"])] == expected


@BOTH_DEPTHS
def test_deadline(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request ends with "abort" when its time is over, running or waiting, and others go on."""
    one = engines(max_num_seqs=2, enable_prefix_caching=False)
    (expected,) = run(one, [Job(prompt(40, 9), greedy(30))])
    now = time.monotonic()
    add(one, "good", Job(prompt(40, 9), greedy(30), {"deadline": now + 9000}))
    add(one, "runs", Job(prompt(41, 40), greedy(30), {"deadline": now + 3600}))
    add(one, "waits", Job(prompt(42, 9), greedy(30), {"deadline": now - 1}))
    outputs = {output.request_id: output for output in one.step()}
    assert outputs["waits"].finished
    assert outputs["waits"].outputs[0].finish_reason == "abort"
    held = one.stats().pages_held
    monkeypatch.setattr("engine.scheduling.scheduler.time.monotonic", lambda: now + 7200)  # its time passes
    outputs |= {output.request_id: output for output in one.step()}
    assert outputs["runs"].finished
    assert len(outputs["runs"].outputs[0].token_ids) == 1
    assert outputs["runs"].outputs[0].finish_reason == "abort"
    assert one.stats().pages_held < held
    assert one.stats().num_aborted == 2
    outputs |= finish(one)
    assert tokens_of(outputs["good"]) == expected


@BOTH_DEPTHS
def test_abort_frees_pages(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """Running, waiting, shared or beams: what is aborted holds nothing, and the rest goes on unchanged."""
    one = engines(max_num_seqs=24, enable_prefix_caching=False)
    for number, job in enumerate(MIXED):
        add(one, str(number), job)
    gone = {"1", "3", "6", "8", "10"}
    outputs = {}
    for _ in range(5):
        outputs |= {output.request_id: output for output in one.step()}
    for name in sorted(gone):
        held, waiting = one.stats().pages_held, one.stats().num_waiting
        one.abort_request(name)
        check_pages(one)
        assert one.stats().pages_held < held or one.stats().num_waiting < waiting
    one.abort_request("never seen")
    outputs |= finish(one)
    for number, answer in enumerate(mixed_answers):
        if str(number) not in gone:
            assert tokens_of(outputs[str(number)]) == answer
    assert one.stats().num_aborted == len(gone)


@BOTH_DEPTHS
def test_abort_one_choice(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """One of n answers ends; the others are what they would have been."""
    one = engines(enable_prefix_caching=False)
    add(one, "x", MIXED[3])
    for _ in range(4):
        one.step()
    held = one.stats().pages_held
    one.abort_request("x", choice=1)
    check_pages(one)
    assert one.stats().pages_held < held
    output = finish(one)["x"]
    assert tokens_of(output)[0] == mixed_answers[3][0]
    assert tokens_of(output)[1] == mixed_answers[3][1][:4]
    assert tokens_of(output)[2] == mixed_answers[3][2]


# ------------------------------------------------------------------ streams


def collect(one: Engine, jobs: list[Job]) -> dict[str, list[RequestDelta]]:
    """All deltas of the jobs, run together."""
    for number, job in enumerate(jobs):
        add(one, str(number), job)
    stream: dict[str, list[RequestDelta]] = {str(number): [] for number in range(len(jobs))}
    while one.has_unfinished_requests():
        for delta in one.step_deltas():
            stream[delta.request_id].append(delta)
        check_pages(one)
    check_idle(one)
    return stream


@BOTH_DEPTHS
def test_streamed_equals_unstreamed(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """Deltas add up to the answer; every choice ends once, and samples come one token at a time."""
    stream = collect(engines(), MIXED)
    for number, job in enumerate(MIXED):
        deltas = stream[str(number)]
        assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        joined: list[list[int]] = [[] for _ in range(job.params.n)]
        ended = [0] * job.params.n
        for delta in deltas:
            for choice in delta.choices:
                assert not ended[choice.index]
                joined[choice.index] += choice.token_ids
                ended[choice.index] += choice.finish_reason is not None
                if job.params.num_beams is None:
                    assert len(choice.token_ids) == 1
        assert joined == mixed_answers[number]
        assert ended == [1] * job.params.n


@BOTH_DEPTHS
def test_beams_stream_their_settled_prefix(engines: Callable[..., Engine]) -> None:
    """What has been streamed is a prefix of the final answer, and it comes before the end."""
    jobs = [
        Job(prompt(seed, 10), beams(count, 24, length_penalty=penalty, early_stopping=stopping))
        for seed, (count, penalty, stopping) in enumerate(
            [(2, 1.0, False), (4, 0.6, True), (4, 2.0, "never"), (3, -1.0, False), (8, 1.0, "never"), (2, 0.0, True)]
            * 4
        )
    ]
    final = run(engines(), jobs)
    stream = collect(engines(), jobs)
    early = 0
    for number, answer in enumerate(final):
        seen: list[list[int]] = [[] for _ in answer]
        for delta in stream[str(number)]:
            for choice in delta.choices:
                seen[choice.index] += choice.token_ids
                assert seen[choice.index] == answer[choice.index][: len(seen[choice.index])]
            early += not delta.finished and bool(delta.choices)
        assert seen == answer
    assert early > len(jobs)


@BOTH_DEPTHS
def test_streams_survive_preemption(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """A preempted request repeats nothing and leaves nothing out."""
    one = engines(block_size=4, num_gpu_blocks_override=40)
    stream = collect(one, MIXED)
    assert one.stats().num_preemptions > 0
    for number, answer in enumerate(mixed_answers):
        joined: list[list[int]] = [[] for _ in answer]
        for delta in stream[str(number)]:
            for choice in delta.choices:
                joined[choice.index] += choice.token_ids
        assert joined == answer
