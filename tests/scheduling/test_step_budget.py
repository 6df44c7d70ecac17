"""Steps stay under the time limit: the budget's own arithmetic, on machines that are formulas, and the scheduler's
part in it. Nothing here reads a clock."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from paged_simulator import Simulator, make_request
from support.driving import make_engine
from support.jobs import CHECKPOINT

from engine.execution import starting
from engine.scheduling.budget import Costs, StepBudget, StepLimit, StepWork
from engine.scheduling.plan import StepPlan
from engine.scheduling.step import NextStep

LIMIT = 0.25
costs = st.builds(
    Costs,
    pair=st.sampled_from([0.0, 1e-6, 1e-3, 0.2]),
    score=st.sampled_from([0.0, 0.5, 9.0]),
    tile=st.sampled_from([1, 32]),
)


@given(costs, st.floats(0.0, 1e7), st.integers(0, 10**6), st.booleans())
def test_what_fits_is_the_most_that_fits(cost: Costs, work: float, start: int, scored: bool) -> None:
    count = cost.fits(work, start, scored)
    assert count >= 0
    if count:
        assert cost.work(start, count, scored) <= work * (1 + 1e-9) + 1e-9
    if cost.tile == 1:
        assert cost.work(start, count + 1, scored) > work * (1 - 1e-9) - 1e-9


@given(st.floats(0.0, 1e4), st.integers(0, 10**5))
def test_chunks_end_with_a_tile(work: float, start: int) -> None:
    """A chunk that passes a tile's end stops at the last one that it reaches."""
    free, cut = Costs().fits(work, start), Costs(tile=32).fits(work, start)
    assert cut <= free < cut + 32
    assert cut == free or (start + cut) % 32 == 0
    assert cut > 0 or free == 0


class Machine:
    """A computer as a formula: it runs the steps that one long prompt after the other is cut into.

    Args:
        fixed, token, pair: seconds of a step, and of what it holds.
        flat: whatever a step holds, it takes so long: memory sets the pace.
    """

    def __init__(self, fixed: float, token: float, pair: float = 0.0, flat: float = 0.0):
        self.fixed, self.token, self.pair, self.flat = fixed, token, pair, flat
        self.factor = 1.0

    def seconds(self, work: StepWork) -> float:
        linear = self.fixed + self.token * work.tokens + self.pair * work.pairs
        return self.factor * max(linear, self.flat + self.pair * work.pairs)

    def budget(self) -> StepBudget:
        """As the engine makes it at its start."""
        probes = [StepWork(1, 0, 1, 1), StepWork(32, 32, 528, 0)]
        return StepBudget(LIMIT, Costs(pair=self.pair / self.token), [(w, self.seconds(w)) for w in probes])

    def prefill(
        self, budget: StepBudget, length: int, *, decoding: int = 0, noise: Callable[[], float] = lambda: 1.0
    ) -> list[tuple[int, float]]:
        """(tokens of the prompt, seconds) of each step."""
        steps, start = [], 0
        while start < length:
            limit = budget.limit()
            left = max(limit.work - decoding * limit.costs.work(100, 1), limit.least)
            most = max(limit.tokens - decoding, int(limit.least))
            count = max(min(limit.costs.fits(left, start), most, length - start), 1)
            pairs = count * start + count * (count + 1) // 2 + 100 * decoding
            work = StepWork(count + decoding, count, pairs, decoding)
            steps.append((count, self.seconds(work) * noise()))
            budget.observe(work, steps[-1][1])
            start += count
        return steps


MACHINES = {
    "small model": Machine(0.002, 0.0002, 1e-8),
    "attention is dear": Machine(0.01, 0.0005, 1e-6),
    "large model": Machine(0.12, 0.004, 1e-8),
    "memory sets the pace": Machine(0.0, 0.001, 1e-8, flat=0.1),
    "nearly at the limit": Machine(0.22, 0.001, 1e-8),
}
# Where one token takes nearly the limit, chunks are tiny, and noise decides about them.
ROOMY = [name for name, machine in MACHINES.items() if machine.fixed < 0.8 * LIMIT]


@pytest.mark.parametrize("name", MACHINES)
def test_steps_stay_under_the_limit_and_near_it(name: str) -> None:
    machine = MACHINES[name]
    steps = machine.prefill(machine.budget(), 20_000)
    assert max(seconds for _, seconds in steps) <= LIMIT
    settled = [seconds for _, seconds in steps[10:-1]]
    assert min(settled) > 0.6 * LIMIT, "steps are needlessly small"
    if machine.pair * 20_000 > machine.token:
        assert steps[-2][0] < steps[10][0] / 3, "late chunks must be smaller"


@pytest.mark.parametrize("name", ROOMY)
def test_noise_costs_little_throughput(name: str) -> None:
    """Every step varies by a fifth, and one in 20 takes four times as long."""
    machine, rng = MACHINES[name], random.Random(1)

    def noise() -> float:
        return rng.uniform(0.9, 1.1) * (4.0 if rng.random() < 0.05 else 1.0)

    quiet = machine.prefill(machine.budget(), 40_000)
    noisy = machine.prefill(machine.budget(), 40_000, noise=noise)
    assert len(noisy) < 1.35 * len(quiet)
    assert sum(1 for _, seconds in noisy if seconds > LIMIT) < 0.2 * len(noisy)


def test_one_slow_step_changes_nothing_for_long() -> None:
    machine = MACHINES["small model"]
    budget = machine.budget()
    machine.prefill(budget, 20_000)
    before = budget.limit().work
    budget.observe(StepWork(1000, 1000, 500_000, 0), 20.0)
    assert budget.limit().work > 0.9 * before
    budget.observe(StepWork(1, 0, 1000, 1), 20.0)
    assert budget.limit().work > 0.9 * before


@pytest.mark.parametrize("name", ROOMY)
def test_a_hang_does_not_leave_tiny_chunks_behind(name: str) -> None:
    """Seconds for a step, several times over: when that has passed, chunks grow again."""
    machine = MACHINES[name]
    budget = machine.budget()
    before = [count for count, _ in machine.prefill(budget, 20_000)][10]
    machine.factor = 100.0
    machine.prefill(budget, 60)
    machine.factor = 1.0
    after = [count for count, _ in machine.prefill(budget, 20_000)]
    assert max(after[:30]) > 0.7 * before


@pytest.mark.parametrize("factor", [0.25, 3.0])
def test_a_machine_that_changes_is_followed(factor: float) -> None:
    """Others came or went on the same cores: after a few steps the limit holds again and is used."""
    machine = Machine(0.002, 0.0002, 1e-8)
    budget = machine.budget()
    machine.prefill(budget, 20_000)
    machine.factor = factor
    steps = machine.prefill(budget, 40_000)
    assert all(0.6 * LIMIT < seconds <= LIMIT for _, seconds in steps[4:-1])


def test_probes_that_were_disturbed_are_forgotten() -> None:
    """The start was busy, so that a probe took longer than it should: a few chunks later that does not matter."""
    machine = MACHINES["small model"]
    for one, many in itertools.product((0.0024, 0.05, 3.0), (0.009, 0.05, 3.0)):
        probes = [(StepWork(1, 0, 1, 1), one), (StepWork(32, 32, 528, 0), many)]
        budget = StepBudget(LIMIT, Costs(pair=machine.pair / machine.token), probes)
        steps = machine.prefill(budget, 60_000)
        assert max(seconds for _, seconds in steps) <= 1.05 * LIMIT, (one, many)
        assert all(seconds > 0.6 * LIMIT for _, seconds in steps[8:-1]), (one, many)


def test_single_steps_that_were_slow_once_allow_no_long_ones() -> None:
    """No request decodes alone any more, so nothing tells that a single token is quick again, but the prompts do."""
    machine = MACHINES["small model"]
    budget = machine.budget()
    machine.prefill(budget, 5000)
    for _ in range(10):
        budget.observe(StepWork(1, 0, 1000, 1), 10.0)
    steps = machine.prefill(budget, 20_000)
    assert max(seconds for _, seconds in steps) <= LIMIT


def test_decoding_rows_leave_prompts_their_least() -> None:
    """64 sequences take more than the limit: a prompt still gets on, and adds little."""
    machine = Machine(0.01, 0.005)
    budget = machine.budget()
    for _ in range(10):
        budget.observe(work := StepWork(64, 0, 6400, 64), machine.seconds(work))
    steps = machine.prefill(budget, 300, decoding=64)
    alone = machine.seconds(StepWork(64, 0, 6400, 64))
    assert alone > LIMIT
    assert all(count > 1 for count, _ in steps[:-1])
    assert max(seconds for _, seconds in steps) <= 1.3 * alone


def test_a_floor_holds_however_slow_steps_are() -> None:
    budget = StepBudget(LIMIT, Costs(), floor=64.0)
    assert budget.limit().least == 64.0, "before anything was observed"
    for _ in range(10):
        budget.observe(StepWork(20, 20), 100 * LIMIT)
    limit = budget.limit()
    assert limit.work < 64.0 <= limit.least
    step = NextStep(2048, limit)
    step.begin_prompts()
    assert step.left == 64.0
    assert step.budget >= 64


def test_where_one_token_exceeds_the_limit_prompts_are_not_held_up() -> None:
    machine = Machine(0.4, 0.005)
    steps = machine.prefill(machine.budget(), 5000)
    assert all(count >= 50 for count, _ in steps[5:-1])
    assert max(seconds for _, seconds in steps) <= 2.1 * 0.405


observations = st.lists(
    st.tuples(
        st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 10**8), st.integers(0, 100), st.floats(-1.0, 1e6)
    ),
    max_size=30,
)


@given(observations, costs, st.floats(1e-3, 100.0))
@settings(max_examples=300)
def test_any_observations_give_a_limit_that_lets_something_run(
    seen: list[tuple[int, int, int, int, float]], cost: Costs, seconds: float
) -> None:
    budget = StepBudget(seconds, cost)
    for tokens, prompt, pairs, scores, taken in seen:
        budget.observe(StepWork(tokens, min(prompt, tokens), pairs, scores), taken)
        limit = budget.limit()
        assert not math.isnan(limit.work)
        assert limit.tokens > 0
        assert limit.least > 0.0


# ---------------------------------------------------------------- the scheduler keeps to it


class Limited(Simulator):
    """A simulator whose steps are limited; it remembers what they held."""

    limit = StepLimit()

    def _schedule(self) -> StepPlan | None:
        schedule = self.scheduler.schedule
        self.scheduler.schedule = lambda: schedule(self.limit)  # type: ignore[method-assign]
        try:
            return super()._schedule()
        finally:
            self.scheduler.schedule = schedule  # type: ignore[method-assign]


def limited(limit: StepLimit, **settings: int) -> Limited:
    sizes = {"num_pages": 400, "block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 200} | settings
    simulator = Limited(**sizes)  # type: ignore[arg-type]
    simulator.limit = limit
    return simulator


def words(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 17) for _ in range(count)]


def test_prompts_are_cut_by_work() -> None:
    limit = StepLimit(Costs(pair=0.1), work=40.0, least=4.0)
    with limited(limit) as sim:
        sim.add(make_request("r", words(100), max_tokens=2))
        counts = []
        while sim.scheduler.has_unfinished():
            plan = sim._schedule()
            assert plan is not None
            counts.append(plan.num_tokens)
            start = int(plan.context_lens[0]) - plan.num_tokens
            assert plan.num_tokens == 1 or limit.costs.work(start, plan.num_tokens) <= 40.0
            sim._deliver(sim.scheduler.update(sim.execute(plan)))
        sim.compare()
    assert counts[0] > 15
    assert 2 <= counts[-3] <= 6, "each token of the last chunks sees a hundred others"


def test_tokens_are_limited_too() -> None:
    with limited(StepLimit(tokens=10, least=1.0)) as sim:
        for number in range(6):
            sim.add(make_request(f"r{number}", words(3, number), max_tokens=30))
        sim.step()
        sim.step()
        sim.add(make_request("late", words(50, 9), max_tokens=1))
        plan = sim._schedule()
        assert plan is not None
        assert plan.num_tokens == 10, "6 decode, and 4 are left for the prompt"
        sim._deliver(sim.scheduler.update(sim.execute(plan)))
        sim.drain()
        sim.compare()


@pytest.mark.parametrize("work", [-math.inf, -5.0, 0.0, 0.5, 1.0, 7.5, math.inf])
@pytest.mark.parametrize("least", [1e-9, 1.0, 6.0])
def test_nothing_starves_and_no_answer_changes(work: float, least: float) -> None:
    """However little a step may hold: everything ends, with the answers that it has alone."""
    limit = StepLimit(Costs(pair=0.01, score=0.5, tile=8), work=work, least=least)
    with limited(limit, num_pages=17, max_num_seqs=6, max_num_batched_tokens=30) as sim:
        for number in range(12):
            how: dict[str, object] = [{}, {"n": 3, "temperature": 1.0}, {"num_beams": 3}, {"prompt_logprobs": 1}][
                number % 4
            ]
            sim.add(make_request(f"r{number}", words(5 + 2 * number, number % 5), max_tokens=12, **how))
            plan = sim._schedule()
            assert plan is not None
            decoding = [row for row in sim._rows() if row.sequence.num_output]
            live = [
                g
                for g in sim.scheduler._running
                if g.started and all(s.num_tokens - s.num_computed == 1 for s in g.sequences)
            ]
            assert {row.group for row in decoding} >= set(live), "a decoding sequence was left out"
            sim._deliver(sim.scheduler.update(sim.execute(plan)))
            sim.check()
        sim.drain()
        sim.compare()
        assert sim.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("limit", [None, 0])
def test_a_start_measures_steps_only_where_they_are_limited(
    limit: float | None, checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = mock.Mock(wraps=starting.measure)
    monkeypatch.setattr(starting, "measure", measure)
    make_engine(checkpoint(CHECKPOINT).path, max_step_time=limit).close()
    assert measure.called == (limit is None)
