"""One step ahead: the next step is planned and launched while one runs, and no answer differs by that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from paged_simulator import FakeModel, make_request
from support.ahead import AheadSimulator, Late
from support.checkpoints import random_prompt
from support.driving import (
    Job,
    Tokens,
    add,
    answers,
    beam_rows,
    check_idle,
    check_pages,
    finish,
    make_engine,
    other_rows,
    run,
    tokens_of,
    watching,
)
from support.jobs import MIXED, beams, greedy, prompt, sampled
from support.seq2seq import make_seq2seq_checkpoint
from support.seq2seq_shapes import SHAPES as SEQ2SEQ

from engine import Engine, SamplingParams
from engine.execution.pending import LateStep
from engine.process import runner as wire
from engine.scheduling.budget import Costs, StepBudget, StepWork
from engine.scheduling.in_flight import Step
from engine.scheduling.plan import StepPlan
from engine.scheduling.sequence import SequenceGroup
from engine.scheduling.step import NextStep
from engine.stepping import Stepping

MORE = [
    Job(prompt(70, 9), greedy(24, logprobs=3)),
    Job(prompt(71, 30), sampled(3, 18, logprobs=0, prompt_logprobs=2)),
    Job(prompt(72, 6), greedy(15, min_tokens=9, ignore_eos=False)),
    Job(prompt(73, 25), sampled(5, 12, n=4, temperature=0.9)),
    Job(prompt(74, 8), greedy(14, bad_words_ids=[[7], [12, 3]], logit_bias={5: 1.5})),
    Job(prompt(75, 10), greedy(1)),
    Job(prompt(76, 2), greedy(2)),
]


@contextmanager
def void_rows(engine: Engine) -> Iterator[list[int]]:
    """Collects how many rows of each step were for nothing when its answer came."""
    steps, seen = engine.scheduler.in_flight, []
    end = steps.end

    def spy() -> Step:
        flight = end()
        seen.append(len(flight.rows) - len(flight.live()))
        return flight

    steps.end = spy  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        steps.end = end  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 12}, {"block_size": 4, "num_gpu_blocks_override": 45}],
    ids=["roomy", "chunks", "few pages"],
)
def test_nothing_that_is_said_differs(settings: dict[str, Any], engines: Callable[..., Engine]) -> None:
    """Tokens, log-probabilities, reasons, scores: bit by bit, for everything that can be asked for."""
    jobs = [*MIXED, *MORE]
    plain, ahead = engines(**settings), engines(async_scheduling=True, **settings)
    for _ in range(2):  # the second time, prompts are found
        with watching(ahead) as plans:
            assert answers(ahead, jobs) == answers(plain, jobs)
        assert sum(plan.sources is not None for plan in plans) > 10
    assert plain.stats().num_steps_ahead == 0
    assert ahead.stats().num_steps_ahead > ahead.stats().num_steps // 3
    assert ahead.stats().prefix_hits > 0 or "num_gpu_blocks_override" in settings
    assert bool(ahead.stats().num_preemptions) == ("num_gpu_blocks_override" in settings)


def test_a_cpu_is_not_run_ahead_unless_it_is_asked_for(engines: Callable[..., Engine]) -> None:
    one = engines()
    with watching(one) as plans:
        run(one, MIXED[:3])
    assert one.stats().num_steps_ahead == 0
    assert all(plan.sources is None for plan in plans)


def test_a_lone_request_s_tokens_come_as_early_as_they_are_known(engines: Callable[..., Engine]) -> None:
    """The n-th step gives the n-th token, although the one after it is on its way."""
    one = engines(async_scheduling=True)
    add(one, "r", Job(prompt(80, 9), greedy(6)))
    lengths = []
    with watching(one) as plans:
        while one.has_unfinished_requests():
            (output,) = one.step()
            lengths.append(len(output.outputs[0].token_ids))
    assert lengths == [1, 2, 3, 4, 5, 6]
    assert len(plans) == 6, "a step after the last one would be for nothing: its length is known"
    assert [None if plan.sources is None else plan.sources.tolist() for plan in plans] == [None, *[[0]] * 5]
    assert all(not plan.token_ids.any() for plan in plans[1:]), "the host does not know these tokens"


@pytest.mark.parametrize(
    "params", [beams(3, 12, ignore_eos=True, no_repeat_ngram_size=3), greedy(12, repetition_penalty=1.3)]
)
def test_what_must_know_an_answer_is_launched_before_that_is_told(
    params: SamplingParams, engines: Callable[..., Engine]
) -> None:
    """Nothing is planned ahead of an answer, and still the device is not idle while the news travel."""
    one, late = engines(async_scheduling=True), engines()
    for engine, number in ((one, 1), (late, 0)):
        add(engine, "r", Job(prompt(83, 9), params))
        engine.step()
        while engine.has_unfinished_requests():
            assert len(engine.scheduler.in_flight) == number
            engine.step()
        assert not engine.scheduler.in_flight
    assert one.stats().num_steps == late.stats().num_steps == 12
    assert one.stats().num_steps_ahead == 0


def test_beams_run_on_with_others(engines: Callable[..., Engine]) -> None:
    """Which beams go on, and with which tokens, is known on the device alone when their next step is planned. The first
    answer, which makes beams of a prompt, is waited for."""
    jobs = [Job(prompt(81, 9), greedy(40)), Job(prompt(82, 9), beams(3, 12, ignore_eos=True))]
    expected = answers(engines(), jobs)
    one = engines(async_scheduling=True)
    with watching(one) as plans:
        assert answers(one, jobs) == expected
    assert [number for number, plan in enumerate(plans) if beam_rows(plan)] == [0, *range(2, 13)]
    assert [number for number, plan in enumerate(plans) if plan.searches is not None] == list(range(3, 13))
    assert [other_rows(plan) for plan in plans] == [1] * 40
    # Alone, they take no step more than in turn.
    with watching(one) as plans:
        assert answers(one, jobs[1:])[0].outputs == expected[1].outputs
    assert [plan.searches is not None for plan in plans] == [False] * 2 + [True] * 10


@pytest.mark.parametrize("how", [{"no_repeat_ngram_size": 2}, {"repetition_penalty": 1.2}, {"bad_words_ids": [[4, 5]]}])
def test_beams_that_must_know_their_tokens_take_turns(how: dict[str, Any], engines: Callable[..., Engine]) -> None:
    jobs = [Job(prompt(81, 9), greedy(40)), Job(prompt(82, 9), beams(3, 12, ignore_eos=True, **how))]
    expected = run(engines(), jobs)
    one = engines(async_scheduling=True)
    with watching(one) as plans:
        assert run(one, jobs) == expected
    searching = [number for number, plan in enumerate(plans) if beam_rows(plan)]
    assert searching == list(range(0, 24, 2))
    assert all(plan.searches is None for plan in plans)
    assert [other_rows(plan) for plan in plans] == [1] * 40


SEARCHES = [
    Job(prompt(120, 9), beams(4, 20)),
    Job(prompt(121, 3), beams(2, 30, ignore_eos=True, logprobs=2)),
    Job(prompt(122, 17), beams(3, 24, length_penalty=0.0, early_stopping=True, stream_beams=True)),
    Job(prompt(123, 30), beams(5, 18, length_penalty=-1.0, early_stopping="never", logprobs=0)),
    Job(prompt(124, 8), beams(3, 21, min_tokens=9, stop_token_ids=[5, 7, 11, 13, 17, 19, 23])),
    Job(prompt(125, 12), beams(4, 16, length_penalty=2.5, early_stopping="never", bad_words_ids=[[7]])),
    Job(prompt(126, 5), SamplingParams(num_beams=6, n=2, max_tokens=25, logit_bias={9: 2.0, 2: 1.0})),
    Job(prompt(127, 26), beams(2, 1)),
    Job(prompt(128, 6), beams(2, 2)),
    Job(prompt(129, 11), sampled(4, 20, n=2)),
    Job(prompt(130, 14), beams(3, 15, no_repeat_ngram_size=2)),
    Job(prompt(131, 33), greedy(25, logprobs=1)),
]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_size": 4},
        {"max_num_batched_tokens": 20, "max_num_seqs": 14, "block_size": 8},
        {"block_size": 4, "num_gpu_blocks_override": 75},
        {"block_size": 2, "num_gpu_blocks_override": 130, "enable_prefix_caching": False},
    ],
    ids=["roomy", "small pages", "chunks", "few pages", "no cache"],
)
def test_searches_are_the_same_ahead(settings: dict[str, Any], engines: Callable[..., Engine]) -> None:
    """Tokens, scores and log-probabilities, bit by bit, in a crowd; pages begin, part and are given back in flight."""
    plain, ahead = engines(**settings), engines(async_scheduling=True, **settings)
    with watching(ahead) as plans, void_rows(ahead) as void:
        assert answers(ahead, SEARCHES) == answers(plain, SEARCHES)
    searches = [plan.searches for plan in plans if plan.searches is not None]
    rows = [(bool(new), width) for one in searches for new, width in zip(one.fresh, one.widths, strict=True)]
    assert len(searches) > 20
    assert sum(not new for new, _ in rows) > 30
    assert sum(new for new, _ in rows) > 2
    assert {width for _, width in rows} >= {2, 3, 4, 5, 6}
    assert sum(void) > 5, "no search ended with a step in flight"
    assert bool(ahead.stats().num_preemptions) == ("num_gpu_blocks_override" in settings)
    assert ahead.stats().num_page_copies > 20


def test_searches_leave_in_flight(engines: Callable[..., Engine]) -> None:
    """Their pages are free at once, and the others' answers are what they would be."""
    plain = engines()
    expected = answers(plain, SEARCHES)
    one = engines(async_scheduling=True, block_size=4, num_gpu_blocks_override=160)
    for number, job in enumerate(SEARCHES):
        add(one, str(number), job)
    outputs, gone = {}, {4: "0", 6: "3", 9: "6"}
    with void_rows(one) as void:
        for step in range(500):
            outputs |= {output.request_id: output for output in one.step()}
            if step in gone:
                one.abort_request(gone[step])
            check_pages(one)
            if not one.has_unfinished_requests():
                break
    check_idle(one)
    assert sum(void) >= 4 + 5 + 6
    for number, output in enumerate(expected):
        if str(number) not in gone.values():
            assert outputs[str(number)].outputs == output.outputs


def test_searches_with_an_encoder_run_ahead(tmp_path: Path) -> None:
    """All beams read the same input, whichever go on."""
    make_seq2seq_checkpoint(SEQ2SEQ["t5"], tmp_path)
    vocab = SEQ2SEQ["t5"].vocab
    jobs = [
        Job(random_prompt(vocab, seed, 5 + 3 * seed), beams(2 + seed % 3, 20, ignore_eos=seed % 2 == 0, **how))
        for seed, how in enumerate([{}, {"early_stopping": True}, {"length_penalty": 0.3}, {"logprobs": 1}])
    ]
    settings = {"block_size": 4, "num_gpu_blocks_override": 400}
    plain, ahead = make_engine(tmp_path, **settings), make_engine(tmp_path, async_scheduling=True, **settings)
    with watching(ahead) as plans:
        assert answers(ahead, jobs) == answers(plain, jobs)
    assert sum(plan.searches is not None and plan.cross is not None for plan in plans) > 15
    plain.close()
    ahead.close()


def test_a_search_goes_on_in_another_process(engines: Callable[..., Engine]) -> None:
    """A plan says all that is needed, and survives the way (`engine.process.runner`)."""
    one, sent = engines(async_scheduling=True), 0
    expected = answers(engines(), SEARCHES[:4])
    launch = one.runner.launch

    def remote(plan: StepPlan) -> LateStep:
        nonlocal sent
        sent += plan.searches is not None
        order = wire._orders.decode(wire._encoder.encode(wire.LaunchStep(plan)))
        assert isinstance(order, wire.LaunchStep)
        return launch(order.plan)

    one.runner.launch = remote  # type: ignore[method-assign]
    assert answers(one, SEARCHES[:4]) == expected
    assert sent > 20


def test_behind_a_step_that_failed_no_beams_are_chosen(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engines(async_scheduling=True)
    add(one, "r", SEARCHES[0])
    with watching(one) as plans:
        finish(one)
    (ahead, *_) = [plan for plan in plans if plan.searches is not None]
    with monkeypatch.context() as patch:
        patch.setattr("engine.execution.runner.score_prompt", lambda *_: 1 / 0)  # when it was sampled
        add(one, "r", Job(prompt(83, 9), beams(3, 12, prompt_logprobs=1)))
        with watching(one) as plans:
            assert finish(one)["r"].error is not None
        with pytest.raises(ZeroDivisionError):
            one.runner.launch(plans[0])
    with pytest.raises(RuntimeError, match="left no candidates"):
        one.runner.launch(ahead)


@pytest.mark.parametrize(
    "how",
    [{"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[4, 5]]}],
    ids=lambda how: next(iter(how)),
)
def test_who_must_know_the_last_token_waits_for_it(how: dict[str, Any], engines: Callable[..., Engine]) -> None:
    jobs = [Job(prompt(83, 9), greedy(12, **how))]
    expected = run(engines(), jobs)
    one = engines(async_scheduling=True)
    assert run(one, jobs) == expected
    assert one.stats().num_steps_ahead == 0
    free = [Job(prompt(83, 9), greedy(12, min_tokens=3, bad_words_ids=[[4]]))]  # the tokens' number is enough
    assert run(one, free) == run(engines(), free)
    assert one.stats().num_steps_ahead == 11


def test_a_stop_token_ends_a_request_that_runs_on(engines: Callable[..., Engine]) -> None:
    """Its row of the next step is for nothing; the others' rows beside it count."""
    plain = engines(enable_prefix_caching=False)
    jobs = [Job(prompt(84, 9), greedy(20)), Job(prompt(85, 9), greedy(20)), Job(prompt(86, 5), sampled(2, 20, n=3))]
    free = run(plain, jobs)
    stops = [free[0][0][6], free[2][1][4]]
    stopped = [
        Job(jobs[0].prompt, greedy(20, stop_token_ids=stops[:1])),
        jobs[1],
        Job(jobs[2].prompt, sampled(2, 20, n=3, stop_token_ids=stops[1:])),
    ]
    expected = answers(plain, stopped)
    one = engines(async_scheduling=True, enable_prefix_caching=False)
    with void_rows(one) as void:
        assert answers(one, stopped) == expected
    assert sum(void) >= 2, "no row ran on beyond an end"
    assert expected[0].outputs[0].finish_reason == expected[2].outputs[1].finish_reason == "stop"
    # Alone, the step that computes only a void row is not waited for.
    add(one, "alone", stopped[0])
    steps = 0
    while one.has_unfinished_requests():
        one.step()
        steps += 1
    assert steps == len(expected[0].outputs[0].token_ids)
    check_idle(one)
    assert run(one, [jobs[1]]) == [free[1]]


def test_requests_and_answers_that_leave_in_flight(engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """Their pages are free at once, although a step writes them still; their next owners are not disturbed."""
    one = engines(async_scheduling=True, block_size=4, num_gpu_blocks_override=60, enable_prefix_caching=False)
    for number, job in enumerate(MIXED):
        add(one, str(number), job)
    outputs = {}
    gone = {3: "0", 5: "4", 6: "6", 8: "2"}
    with void_rows(one) as void:
        for step in range(500):
            outputs |= {output.request_id: output for output in one.step()}
            if step in gone:
                assert len(one.scheduler.in_flight) <= 1
                one.abort_request(gone[step])
            if step == 4:
                held = one.stats().pages_held
                one.abort_request("3", choice=1)
                assert one.stats().pages_held < held
            check_pages(one)
            if not one.has_unfinished_requests():
                break
    check_idle(one)
    assert sum(void) >= 3
    for number, answer in enumerate(mixed_answers):
        told = tokens_of(outputs[str(number)])
        for choice, whole in enumerate(answer):
            left = str(number) in gone.values() or (number, choice) == (3, 1)
            assert told[choice] == (whole[: len(told[choice])] if left else whole)
    assert len(tokens_of(outputs["3"])[1]) < 20


@pytest.mark.parametrize("late", [False, True], ids=["at the launch", "with the answer"])
def test_a_step_that_fails_in_flight(late: bool, engines: Callable[..., Engine], mixed_answers: list[Tokens]) -> None:
    """Each third launch breaks: only the request that breaks alone fails, and what was launched after it runs again."""
    one = engines(async_scheduling=True, block_size=4, num_gpu_blocks_override=60)
    launch, count, broken = one.runner.launch, 0, 0
    poison = 300

    def error() -> None:
        raise RuntimeError("made by the test")

    def fragile(plan: StepPlan) -> LateStep:
        nonlocal count, broken
        if ((plan.positions == 0) & (plan.token_ids == poison)).any():
            error()
        step = launch(plan)  # so that pages are written before it fails
        if len(plan.context_lens) > 4:
            count += 1
            if count % 3 == 0:
                broken += 1
                if not late:
                    error()
                step.candidates = Late(step.result(), garble=error)
        return step

    one.runner.launch = fragile  # type: ignore[method-assign]
    for number, job in enumerate([Job([poison, 4, 5], greedy()), *MIXED]):
        add(one, str(number), job)
    again = 0
    plan_again = one.scheduler.in_flight.plan

    def spy(step: Step) -> StepPlan:
        nonlocal again
        again += not step.is_part
        return plan_again(step)

    one.scheduler.in_flight.plan = spy  # type: ignore[method-assign]
    outputs = finish(one)
    assert broken > 5
    assert (again > 0) == late, "an answer that fails has a step behind it"
    assert outputs["0"].outputs[0].finish_reason == "error"
    assert [tokens_of(outputs[str(1 + number)]) for number in range(len(MIXED))] == mixed_answers
    assert one.stats().num_steps_ahead > 5


def test_short_of_pages_the_flights_land_first(
    engines: Callable[..., Engine], mixed_answers: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is preempted for a step that is planned ahead."""
    one = engines(async_scheduling=True, block_size=4, num_gpu_blocks_override=40)
    preempt, drained = one.scheduler._preempt, 0

    def spy(*arguments: Any) -> None:
        assert not one.scheduler.in_flight, "a request is preempted while a step is in flight"
        preempt(*arguments)

    monkeypatch.setattr(one.scheduler, "_preempt", spy)

    def count(_: int) -> None:
        nonlocal drained
        drained += one.scheduler._drains

    for number, job in enumerate(MIXED):
        add(one, str(number), job)
    outputs = finish(one, count)
    assert [tokens_of(outputs[str(number)]) for number in range(len(MIXED))] == mixed_answers
    assert drained > 2
    assert one.stats().num_preemptions > 2
    assert one.stats().num_steps_ahead > 5


def test_an_urgent_request_takes_its_place_after_the_flight(engines: Callable[..., Engine]) -> None:
    one = engines(async_scheduling=True, max_num_seqs=2)
    jobs = [
        Job(prompt(90 + number, 9), greedy(12), {"priority": priority}) for number, priority in enumerate((9, 8, 0))
    ]
    expected = run(engines(), jobs)
    for name in (0, 1):
        add(one, str(name), jobs[name])
    one.step()
    add(one, "2", jobs[2])
    outputs = {}
    for _ in range(3):
        outputs |= {output.request_id: output for output in one.step()}
    assert tokens_of(outputs["2"])[0], "it waits for longer than the step in flight and its own"
    assert one.stats().num_preemptions == 1
    outputs |= finish(one)
    assert [tokens_of(outputs[str(number)]) for number in range(3)] == expected


def test_a_deadline_passes_in_flight(engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    one = engines(async_scheduling=True)
    now = SimpleNamespace(value=1000.0)
    monkeypatch.setattr("engine.scheduling.scheduler.time", SimpleNamespace(monotonic=lambda: now.value))
    (expected,) = run(engines(), [Job(prompt(95, 9), greedy(10))])
    add(one, "good", Job(prompt(95, 9), greedy(10)))
    add(one, "late", Job(prompt(96, 9), greedy(30), {"deadline": 2000.0}))
    one.step()
    now.value = 3000.0
    with void_rows(one) as void:
        outputs = {output.request_id: output for output in one.step()}
        assert outputs["late"].outputs[0].finish_reason == "abort"
        assert len(outputs["late"].outputs[0].token_ids) == 1
        assert void == [1]
        outputs |= finish(one)
    assert tokens_of(outputs["good"]) == expected
    check_idle(one)


def test_ctrl_c_ends_all_that_is_in_flight(engines: Callable[..., Engine]) -> None:
    """And nothing that waits; the engine goes on."""
    one = engines(async_scheduling=True, max_num_seqs=2)
    jobs = [Job(prompt(100 + number, 9), greedy(8)) for number in range(3)]
    expected = run(engines(), jobs)
    for number in range(3):
        add(one, str(number), jobs[number])
    launch = one.runner.launch
    calls = 0

    def interrupted(plan: StepPlan) -> LateStep:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return launch(plan)

    one.runner.launch = interrupted  # type: ignore[method-assign]
    one.step()
    one.step()
    with pytest.raises(KeyboardInterrupt):
        one.step()
    assert not one.scheduler.in_flight
    assert [group.request.request_id for group in one.scheduler.groups()] == ["2"]
    outputs = finish(one)
    assert tokens_of(outputs["2"]) == expected[2]
    assert run(one, jobs) == expected


def test_closing_with_a_step_in_flight(engines: Callable[..., Engine]) -> None:
    one = engines(async_scheduling=True)
    for number, job in enumerate(MIXED):
        add(one, str(number), job)
    for _ in range(3):
        one.step()
    assert one.scheduler.in_flight
    one.close()
    assert not one.has_unfinished_requests()
    one.check_integrity()
    assert one.scheduler.snapshot().pages_held == 0


def test_who_looks_on_sees_what_is_known(engines: Callable[..., Engine]) -> None:
    """The map of the cache and the statistics know nothing of the step in flight."""
    one = engines(async_scheduling=True)
    add(one, "r", Job(prompt(110, 9), greedy(8)))
    for number in range(1, 5):
        one.step()
        (live,) = one.cache_map().running
        assert (live.num_prompt, live.num_output, live.num_computed) == (9, number, 9 + number - 1)
        assert one.stats().num_steps == number
        assert one.stats().generation_tokens == number
    assert one.stats().num_steps_ahead == 4
    finish(one)


# ---------------------------------------------------------------- the scheduler, and a memory that is looked at


class Narrow(FakeModel):
    """Often only the end of an answer is possible, or one token besides."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(1)
        for row in self._rows:
            if rng.random() < 0.6:
                row[1:] = np.where(np.arange(1, len(row)) == rng.integers(1, 2 * len(row)), row[1:], -np.inf)


def simulator(**settings: Any) -> AheadSimulator:
    defaults = {"num_pages": 40, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "caching": False}
    return AheadSimulator(**(defaults | settings))


def words(seed: int, length: int) -> list[int]:
    return [2 + (seed * 5 + i * i + 3 * i) % 15 for i in range(length)]


def group_of(sim: AheadSimulator, name: str) -> SequenceGroup:
    return next(group for group in sim.scheduler.groups() if group.request.request_id == name)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_copy_s_source_is_kept_until_the_step_is_over(gone: int) -> None:
    """The step that copies a page fails when its answer is read, and is run again. Meanwhile one of the answers that
    shared the page is gone, and another request has taken every page that was free."""
    with simulator(num_pages=16) as sim:
        sim.add(make_request("other", words(1, 3), max_tokens=20))
        sim.step()
        sim.step()
        sim.add(make_request("r", words(2, 6), max_tokens=8, n=2, temperature=1.0, seed=3))
        sim.runner.strikes, sim.runner.waits = [True], True
        while not sim.ahead["copies of broken steps"]:
            sim.step()
        assert sim.ahead["broken ahead"] == len(sim.scheduler.in_flight) == len(sim.scheduler.in_flight.pinned()) == 1
        assert sim.abort("r", gone)
        sim.add(make_request("greedy one", words(3, 4 * sim.pool.num_available), max_tokens=1))
        sim.step()
        assert sim.ahead["broken later"] == 1
        assert sim.ahead["planned again"] == 0
        sim.drain()
        assert sim.ahead["planned again"] == 1
        sim.compare()


@pytest.mark.parametrize("how", [{"n": 2, "temperature": 1.0}, {"num_beams": 2}], ids=["n", "beams"])
def test_pages_are_copied_again_behind_a_step_that_failed(how: dict[str, Any]) -> None:
    with simulator() as sim:
        sim.add(make_request("other", words(1, 3), max_tokens=20))
        sim.step()
        sim.add(make_request("r", words(2, 6), max_tokens=8, **how))
        while len(group_of(sim, "r").sequences) == 1:
            sim.step()
        # What is in flight was launched before they parted. The next step copies; that one breaks before it.
        assert len(sim.scheduler.in_flight) == 1
        sim.runner.broken = sim.scheduler.in_flight.newest
        (launched,) = sim.scheduler.in_flight
        assert isinstance(launched.answer, LateStep)
        assert isinstance(launched.answer.candidates, Late)
        launched.answer.candidates.garble = sim.runner.forget
        sim.step()
        (flight,) = sim.scheduler.in_flight
        assert flight.copies
        sim.drain()
        assert sim.ahead["planned again"] == 1
        sim.compare()


def test_a_common_prefix_is_computed_in_turn() -> None:
    """Answers that were preempted compute what they have in common once, in chunks; where that ends, they part."""
    with simulator(max_num_batched_tokens=8) as sim:
        sim.add(make_request("other", words(1, 3), max_tokens=60))
        sim.add(make_request("r", words(2, 26), max_tokens=12, n=3, temperature=1.0, seed=5))
        while len(group_of(sim, "r").sequences) == 1:
            sim.step()
        for _ in range(3):
            sim.step()
        group = group_of(sim, "r")
        sim.scheduler._preempt(NextStep(0), group)
        assert group.fork_point is not None
        before = sim.scheduler.stats.num_steps_ahead
        sim.drain()
        sim.compare()
        assert sim.scheduler.stats.num_steps_ahead - before > 30


def test_a_request_that_comes_back_is_not_taken_for_its_former_self() -> None:
    """It is preempted with a step in flight, and planned anew behind that step, with tokens that are known."""
    with simulator(caching=True) as sim:
        sim.add(make_request("other", words(1, 3), max_tokens=20))
        sim.add(make_request("r", words(2, 6), max_tokens=12))
        while group_of(sim, "r").sequences[0].num_tokens != 9:
            sim.step()
        group = group_of(sim, "r")
        sim.scheduler._preempt(NextStep(0), group)
        sim.step()  # eight of its tokens are found, and the ninth is known
        assert group.sequences[0].num_tokens == 9, "what was in flight was for nothing"
        assert (group.sequences[0].num_computed, group.sequences[0].num_in_flight) == (8, 1)
        sim.drain()
        sim.compare()
        assert sim.ahead["rows for nothing"] == 1


def test_an_input_that_is_being_encoded_is_waited_for() -> None:
    with simulator(caching=True) as sim:
        source = tuple(words(4, 9))
        sim.add(make_request("other", words(1, 3), max_tokens=30))
        sim.step()
        sim.add(make_request("a", words(2, 2), max_tokens=5, encoder_token_ids=source))
        sim.step()  # it is encoded ahead
        sim.add(make_request("b", words(3, 2), max_tokens=5, encoder_token_ids=source))
        sim.drain()
        sim.compare()
        assert (sim.scheduler.stats.num_encoder_runs, sim.scheduler.stats.num_encoder_hits) == (1, 1)


def test_a_step_s_time_begins_when_the_one_before_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second of a device is counted twice, although the host plans while it is busy."""
    clock = SimpleNamespace(now=0.0, free=0.0)
    monkeypatch.setattr("engine.stepping.time", SimpleNamespace(perf_counter=lambda: clock.now))
    observed: list[float] = []

    class Watched(StepBudget):
        def observe(self, work: StepWork, seconds: float) -> None:
            observed.append(seconds)

    with simulator() as sim:
        sim.stepping = Stepping(sim.scheduler, sim.runner, Watched(1.0, Costs()), depth=1)
        launch = sim.runner.launch

        def slow(plan: StepPlan) -> LateStep:
            step = launch(plan)
            clock.now += 1.0  # of the host
            clock.free = due = max(clock.free, clock.now) + 10.0  # of the device
            assert isinstance(step.candidates, Late)
            step.candidates.wait = lambda: setattr(clock, "now", max(clock.now, due))
            return step

        sim.runner.launch = slow
        sim.add(make_request("r", words(1, 3), max_tokens=5))
        sim.drain()
    assert observed == [11.0, *[10.0] * 4]
    assert sim.scheduler.stats.step_seconds == clock.now == 51.0


def test_a_search_that_loses_beams_in_flight() -> None:
    """The rows that ran on were as many as before; those beams that are left are computed again."""
    with AheadSimulator(
        num_pages=60, block_size=3, max_num_seqs=12, max_num_batched_tokens=64, caching=False, model=Narrow()
    ) as sim:
        for number in range(40):
            how = {"num_beams": 2 + number % 4, "stop_ids": frozenset({0}), "eos_ids": frozenset({0})}
            sim.add(make_request(f"r{number}", words(number, 2 + number % 5), max_tokens=16, **how))
            sim.step()
        sim.drain()
        sim.compare()
    assert sim.ahead["searches for nothing"] > 3
    assert sim.ahead["beams that parted ahead"] > 3
    assert sim.ahead["new pages ahead"] > 3
