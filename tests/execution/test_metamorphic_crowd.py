"""Sixty-five requests of every kind at once on forty pages, offline and through the asyncio client.

Each gives the answer that it gives alone, those that leave early a beginning of it; and afterwards every
page is free or cached.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from support.checkpoints import Checkpoint
from support.driving import Job, Tokens, add, check_idle, check_pages, make_engine, run_alone
from support.faults import Gate
from support.jobs import CHECKPOINT, beams, greedy, prompt, sampled

from engine import EngineConfig, EngineStats, RequestDelta
from engine.process.client import EngineClient, start_engine

PAGES = 40
SETTINGS = {"block_size": 4, "num_gpu_blocks_override": PAGES, "max_num_seqs": 24, "max_num_batched_tokens": 96}
SHARED = prompt(1000, 14)


def crowd() -> list[Job]:
    """64 jobs, of which three of four begin alike; and a long one."""
    kinds = itertools.cycle(
        [
            lambda seed: greedy(16),
            lambda seed: sampled(seed, 18, top_k=40, n=1 + seed % 3),
            lambda seed: beams(2 + seed % 3, 12),
            lambda seed: sampled(seed, 14, temperature=1.2, top_p=0.9, repetition_penalty=1.1),
            lambda seed: beams(4, 10, length_penalty=0.6, early_stopping=True),
            lambda seed: greedy(20, ignore_eos=False),
            lambda seed: sampled(seed, 10, min_p=0.02, presence_penalty=0.3),
        ]
    )
    jobs = []
    for seed, kind in zip(range(64), kinds, strict=False):
        tokens = prompt(2000 + seed, 2 + seed % 9)
        jobs.append(Job(tokens if seed % 4 == 3 else [*SHARED, *tokens], kind(seed)))
    return [*jobs, Job(prompt(3000, 2), greedy(LATE + 20))]


LATE = 50  # a position that only the last job reaches
JOBS = crowd()
# Which requests leave early, and after how many deltas.
LEAVERS = {number: 1 + number % 5 for number in range(4, 64, 6)} | {64: 1}


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Checkpoint]) -> list[Tokens]:
    """What each job answers alone, with room for everything and nothing cached."""
    engine = make_engine(checkpoint(CHECKPOINT).path, enable_prefix_caching=False)
    answers = run_alone(engine, JOBS)
    assert engine.stats().num_preemptions == engine.stats().prefix_hits == 0
    engine.close()
    return answers


def join(deltas: list[RequestDelta], n: int) -> Tokens:
    """The answers that a request's deltas add up to."""
    joined: Tokens = [[] for _ in range(n)]
    for delta in deltas:
        assert delta.error is None
        for choice in delta.choices:
            joined[choice.index] += choice.token_ids
    return joined


def assert_answers(streams: list[list[RequestDelta]], alone: list[Tokens]) -> None:
    for number, (deltas, answer) in enumerate(zip(streams, alone, strict=True)):
        joined = join(deltas, len(answer))
        if number in LEAVERS:
            assert len(deltas) <= LEAVERS[number]
            assert joined == [whole[: len(part)] for part, whole in zip(joined, answer, strict=True)], number
        else:
            assert joined == answer, number
            assert deltas[-1].finished


def assert_eventful(stats: EngineStats) -> None:
    assert stats.num_preemptions > 0
    assert stats.prefix_hits > 0
    assert stats.num_page_copies > 0
    assert stats.peak_pages_held <= PAGES
    assert stats.pages_held == stats.num_running == stats.num_waiting == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total == PAGES


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
def test_offline(ahead: bool, checkpoint: Callable[[str], Checkpoint], alone: list[Tokens]) -> None:
    """All at once, step by step, some aborted after a few deltas."""
    engine = make_engine(checkpoint(CHECKPOINT).path, async_scheduling=ahead, **SETTINGS)
    for number, job in enumerate(JOBS):
        add(engine, str(number), job)
    streams: list[list[RequestDelta]] = [[] for _ in JOBS]
    most_running = left = 0
    while engine.has_unfinished_requests():
        for delta in engine.step_deltas():
            number = int(delta.request_id)
            streams[number].append(delta)
            if len(streams[number]) == LEAVERS.get(number) and not delta.finished:
                engine.abort_request(delta.request_id)
                left += 1
        check_pages(engine)
        most_running = max(most_running, engine.stats().num_running)
    assert_answers(streams, alone)
    stats = engine.stats()
    assert left == stats.num_aborted > 5
    assert stats.num_finished == len(JOBS) - left
    assert most_running > 4
    assert_eventful(stats)
    check_idle(engine)
    engine.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["in-turn", "ahead"])
@pytest.mark.slow
def test_through_the_client(
    ahead: bool,
    checkpoint: Callable[[str], Checkpoint],
    alone: list[Tokens],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """65 tasks of one event loop; those that leave close their iterator. However late they learn of their tokens, the
    last one leaves before it has ended."""
    gate = Gate(tmp_path, monkeypatch, position=LATE)
    streams, stats = asyncio.run(asyncio.wait_for(_serve(checkpoint(CHECKPOINT).path, ahead, gate), timeout=540))
    assert (stats.num_steps_ahead > 20) == ahead
    assert_answers(streams, alone)
    assert stats.num_aborted > 0
    assert_eventful(stats)
    assert stats.pages_held == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total


async def _serve(path: Path, ahead: bool, gate: Gate) -> tuple[list[list[RequestDelta]], EngineStats]:
    common = {"device": "cpu", "dtype": "float32", "show_progress": False, "async_scheduling": ahead}
    client = start_engine(EngineConfig(model=str(path), **common, **SETTINGS))  # type: ignore[arg-type]
    try:
        gate.close()
        tasks = [asyncio.create_task(_ask(client, number)) for number in range(len(JOBS))]
        await tasks[-1]
        gate.open()
        streams = await asyncio.gather(*tasks)
        while (stats := client.stats()).num_running or stats.num_waiting:
            await asyncio.sleep(0.01)
        return streams, stats
    finally:
        await client.close()
        assert not client.is_alive


async def _ask(client: EngineClient, number: int) -> list[RequestDelta]:
    deltas: list[RequestDelta] = []
    async with aclosing(client.generate(str(number), list(JOBS[number].prompt), JOBS[number].params)) as stream:  # type: ignore[type-var]
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == LEAVERS.get(number):
                break
    return deltas
