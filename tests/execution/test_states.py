"""State slots of hybrid models: failures, few slots, snapshots and forks change no answer, and no slot is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.driving import Job, add, check_idle, finish, make_engine, run, run_alone, watching
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.jobs import MIXED, VOCAB, beams, greedy, prompt, sampled
from support.native import needs_native
from test_drafts import Oracle

from engine import MAX_PRIORITY, Engine, EngineConfig, InvalidRequestError, RequestOutput, SamplingParams
from engine.execution import profiling, recovery
from engine.execution.pending import LateStep
from engine.inspection import inspect_model
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepPlan
from engine.scheduling.row import Row
from engine.scheduling.sequence import Sequence
from engine.scheduling.state_slots import StateSlots

JOBS = [
    *[MIXED[number] for number in (0, 2, 3, 5, 6, 8)],
    Job(prompt(70, 41), greedy(12)),
    Job(prompt(71, 30), sampled(3, 18, logprobs=0, prompt_logprobs=2)),
    Job(prompt(72, 27), beams(3, 12, ignore_eos=True)),
]


@pytest.fixture(scope="module", params=["qwen3.5", "falcon-h1"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_family_checkpoint(replace(FAMILY_SHAPES[request.param], vocab=VOCAB), path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[object]:
    """The answer to each job alone, nothing cached."""
    with engine_of(folder, enable_prefix_caching=False) as one:
        return list(run_alone(one, JOBS))


class engine_of:
    """An engine that is closed at the end, when it must hold nothing."""

    def __init__(self, folder: Path, **settings: object):
        self.engine: Engine = make_engine(folder, **({"max_model_len": 100, "block_size": 4} | settings))

    def __enter__(self) -> Engine:
        return self.engine

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            check_idle(self.engine)
        self.engine.close()


def outputs(engine: Engine, jobs: list[Job]) -> list[RequestOutput]:
    for number, job in enumerate(jobs):
        add(engine, str(number), job)
    answers = finish(engine)
    return [answers[str(number)] for number in range(len(jobs))]


def said(answers: list[RequestOutput]) -> list[Any]:
    return [(answer.outputs, answer.prompt_logprobs) for answer in answers]


def slots_of(engine: Engine) -> BlockPool:
    assert engine.scheduler.states is not None
    return engine.scheduler.states.pool


@pytest.mark.parametrize("most", [(9, 2), (1, 99), (16, 99)])
def test_steps_that_fail_after_they_have_written(
    most: tuple[int, int], folder: Path, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a step that is computed again reads the states from before it."""
    tokens, rows = most
    rng, failed = random.Random(3), 0
    for name in ("_PATIENCE", "_MOST_PATIENCE"):  # the next step is as large again
        monkeypatch.setattr(recovery, name, 1)
    with engine_of(folder) as one:
        launch = one.runner.launch

        def limited(plan: StepPlan) -> LateStep:
            nonlocal failed
            step = launch(plan)
            if plan.num_tokens > tokens or plan.num_rows > rows or (plan.num_tokens > 1 and rng.random() < 0.2):
                failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory, says the test")
            return step

        one.runner.launch = limited  # type: ignore[method-assign]
        assert run(one, JOBS) == alone
        assert failed > 8


def test_few_slots_are_shared_by_turns(folder: Path, alone: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "count_slots", lambda *args, **more: 12)
    with engine_of(folder) as one:
        assert run(one, JOBS) == alone
        assert one.stats().num_preemptions > 0
        assert slots_of(one).total == 12 >= slots_of(one).peak_held


def test_a_request_that_needs_more_slots_than_there_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "count_slots", lambda *args, **more: 5)
    with engine_of(folder) as one, pytest.raises(InvalidRequestError, match=r"n is 3, but the 5 state slots.* 2 seq"):
        run(one, [Job(prompt(1, 9), SamplingParams(n=3, temperature=1.0, max_tokens=4, seed=1))])


def test_a_conversation_goes_on_from_the_last_page_of_its_answer(folder: Path) -> None:
    """The prompt's last page and the answer's last one have snapshots; pages between have none."""
    first = Job(prompt(70, 33), greedy(20, ignore_eos=True))
    with engine_of(folder, enable_prefix_caching=False) as one:
        (answer,) = run(one, [first])
        text = [*first.prompt, *answer[0]]
        longer = [text[:40], text + prompt(5, 6), text[:34] + prompt(6, 3)]
        expected = run_alone(one, [Job(tokens, greedy(6)) for tokens in longer])
    with engine_of(folder) as one:
        run(one, [first])
        assert slots_of(one).num_cached == 2
        hits = []
        for tokens, wanted in zip(longer, expected, strict=True):
            before = one.stats().prefix_hits
            assert run(one, [Job(tokens, greedy(6))]) == [wanted]
            hits.append(one.stats().prefix_hits - before)
    assert hits == [32, 52, 32]


@needs_native
@pytest.mark.parametrize(("right", "settings"), [(0, {}), (2, {"max_num_batched_tokens": 24}), (5, {})])
def test_drafts_change_no_bit(right: int, settings: dict[str, Any], folder: Path) -> None:
    """However many of five drafts are right: after a wrong one, a sequence continues from the state before the row."""
    jobs = [*JOBS, Job(prompt(73, 9), greedy(20, logprobs=2, ignore_eos=True))]
    with engine_of(folder, **settings) as one:
        plain = outputs(one, jobs)
        oracle = Oracle(plain, right, 5 - right)
        one.scheduler.drafter = oracle
        for _ in range(2):
            before = one.stats()
            assert said(outputs(one, jobs)) == said(plain)
            after = one.stats()
            accepted = after.num_accepted_draft_tokens - before.num_accepted_draft_tokens
            drafted = after.num_draft_tokens - before.num_draft_tokens
            assert drafted > 40
            assert (accepted > 20) == (right > 0)
            assert (accepted == drafted) == (right == 5)


@needs_native
def test_a_step_with_drafts_that_fails_is_computed_without_them(folder: Path) -> None:
    """It writes no snapshot behind its known tokens."""
    job = Job(prompt(74, 10), greedy(24, logprobs=1, ignore_eos=True))
    with engine_of(folder) as one:
        plain = outputs(one, [job])
        one.scheduler.drafter = Oracle(plain, 3, 3)
        launch, failed = one.runner.launch, []

        def broken(plan: StepPlan) -> LateStep:
            if plan.sampling is not None and plan.sampling.spans is not None and len(failed) < 4:
                failed.append(plan)
                raise RuntimeError("made by the test")
            return launch(plan)

        one.runner.launch = broken  # type: ignore[method-assign]
        assert said(outputs(one, [job])) == said(plain)
        assert len(failed) == 4
        assert one.stats().num_accepted_draft_tokens > 0


def test_a_wrong_draft_of_a_client_stops_no_background_request(folder: Path) -> None:
    """The tokens that the client's row computes again are not those of a prompt."""
    jobs = [
        Job(prompt(seed, 6), greedy(12), {"priority": priority}) for seed, priority in ((75, 0), (76, MAX_PRIORITY))
    ]
    with engine_of(folder) as one:
        one.scheduler.drafter = Oracle(outputs(one, jobs), 0, 2)
        with watching(one) as plans:
            outputs(one, jobs)
        assert [plan.num_rows for plan in plans if plan.num_rows > 1] == [2] * 11
        assert one.stats().num_draft_tokens > 20


@pytest.mark.parametrize(("cache", "count"), [(26, 12), (10, 4)])
def test_states_that_are_large_leave_room_for_four_requests(cache: int, count: int, tmp_path: Path) -> None:
    """In the proportions of 20 MB and 52 MB of states in 512 MiB of cache. Each request holds two slots in a step, and
    snapshots have the rest; in the second case the requests take turns."""
    make_family_checkpoint(replace(FAMILY_SHAPES["qwen3.5"], vocab=VOCAB), tmp_path)
    with engine_of(tmp_path) as one:
        assert one.runner.cache.states is not None
        size = sum(layer[0].nbytes for layer in one.runner.cache.states.layers)
    settings = {"kv_cache_memory": cache * size, "num_gpu_blocks_override": None, "max_num_seqs": 64}
    jobs = [Job(prompt(80 + number, 30), greedy(12, ignore_eos=True)) for number in range(4)]
    with engine_of(tmp_path, enable_prefix_caching=False) as one:
        expected = run_alone(one, jobs)
    with engine_of(tmp_path, **settings) as one, watching(one) as plans:
        assert run(one, jobs) == expected
        assert slots_of(one).total == count
        if count >= 2 * len(jobs):
            assert one.stats().num_preemptions == 0
            assert max(plan.num_rows for plan in plans) == 4


@pytest.fixture
def slots() -> Iterator[StateSlots]:
    """Six slots of pages of four tokens; none is lost at the end."""
    states = StateSlots(BlockPool(6), 4, publishes=True)
    yield states
    assert states.pool.num_held == 0


def row(sequence: Sequence, count: int) -> Row:
    return Row(None, sequence, sequence.num_computed, count, 0)  # type: ignore[arg-type]


def test_a_row_that_is_divided_has_a_state_between_its_parts(slots: StateSlots) -> None:
    sequence = Sequence(0, range(11), with_logprobs=False)
    whole = row(sequence, 11)
    assert slots.take(whole, least=0)
    assert whole.state is not None
    assert (whole.state.source, whole.state.after) == (0, 8)
    first, second = slots.split(whole, 5) or (None, None)
    assert first is not None
    assert second is not None
    assert (first.source, first.snapshot, second.target) == (0, 0, whole.state.target)
    assert first.target == second.source != whole.state.target
    assert (second.snapshot, second.after) == (whole.state.snapshot, 3)
    slots.advance(replace(whole, count=5, state=first), str)  # type: ignore[arg-type]
    slots.advance(replace(whole, start=5, count=6, state=second), lambda pages: b"%d" % pages)
    assert sequence.states == [whole.state.target]
    assert slots.match([b"1", b"2"]) == 2
    slots.check([sequence])
    slots.release(sequence)


def test_no_row_is_divided_without_a_free_slot(slots: StateSlots) -> None:
    sequences = [Sequence(0, range(3), with_logprobs=False) for _ in range(6)]
    rows = [row(sequence, 3) for sequence in sequences]
    assert all(slots.take(one, least=9) for one in rows)
    assert slots.split(rows[0], 1) is None
    assert not slots.take(row(sequences[0], 3), least=9)
    for sequence in sequences:
        slots.release(sequence)


def test_slots_are_counted_before_a_start(folder: Path) -> None:
    settings = {"kv_cache_memory": "8MiB", "num_gpu_blocks_override": None}
    given = {"device": "cpu", "dtype": "float32", "max_model_len": 100, "block_size": 4}
    facts = inspect_model(EngineConfig(model=str(folder), skip_tokenizer_init=True, **given, **settings))
    with engine_of(folder, **settings) as one:
        cache = one.runner.cache
        assert cache.states is not None
        assert facts.num_states == cache.states.slots == slots_of(one).total
        assert facts.states == sum(layer.nbytes for layer in cache.states.layers)
        assert facts.pages + facts.states <= 8 * 2**20
        assert one.info.num_blocks == facts.num_blocks
