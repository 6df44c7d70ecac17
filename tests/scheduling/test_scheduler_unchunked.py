"""Pooling requests under any order of events: inputs that are read whole, and prompts that are pooled in chunks.

Whole inputs have an oracle that plans each step anew from a sorted list. Chunked prompts run on the memory of
`paged_simulator`, whose hidden states are a function of all tokens before, beside requests that generate.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from paged_simulator import VOCAB, FakeModel, Simulator, make_request

from engine.errors import InvalidRequestError
from engine.execution.pooler import Pooler
from engine.interface.outputs import PoolingMode, RequestDelta
from engine.interface.pooling import Pooling
from engine.interface.request import Request
from engine.model.spec import Pool
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.budget import UNLIMITED, Costs, StepLimit
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.needs import SequenceNeeds
from engine.scheduling.plan import PooledRow, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler

# ------------------------------------------------------------------ inputs that are read whole


def whole_request(name: str, tokens: Sequence[int], **terms: object) -> Request:
    return dataclasses.replace(make_request(name, tokens, **terms), pooling=Pooling(task="embed", modes=("mean",)))


def answer_to(tokens: Sequence[int]) -> list[float]:
    """What the reader of these tests makes of an input: it shows each token and its place."""
    return [float(len(tokens)), float(sum(place * token for place, token in enumerate(tokens, start=1)))]


class Reader:
    """The scheduler of whole inputs with a runner that is no model, and what should be in each step."""

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int):
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=16,
            needs=SequenceNeeds(paged=False),
        )
        self.scheduler = Scheduler(self.config, BlockPool(0))
        self.requests: dict[str, Request] = {}
        self.queue: list[tuple[int, int, str]] = []  # of those that are not over: priority, arrival, name
        self.ends: dict[str, str] = {}
        self.now = 0.0
        self.events: Counter[str] = Counter()

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.queue.append((request.priority, len(self.requests), request.request_id))
        self.requests[request.request_id] = request
        self.check()

    def abort(self, name: str) -> None:
        assert self.scheduler.abort(name)
        assert not self.scheduler.abort(name)
        self._end(name, "aborted")
        self.check()

    def step(self, limit: StepLimit = UNLIMITED, faults: set[str] | None = None) -> None:
        """One step; if it breaks, the requests of `faults` are those that break alone, too."""
        for _, _, name in sorted(self.queue):
            deadline = self.requests[name].deadline
            if deadline is not None and deadline <= self.now:
                self.ends[name] = "deadline"
        expected = self._expected(limit)
        with mock.patch("engine.scheduling.scheduler.time", SimpleNamespace(monotonic=lambda: self.now)):
            plan = self.scheduler.schedule(limit)
        if plan is None:
            assert not expected
            deltas = self.scheduler.take_outbox()
        elif faults is None:
            assert self._read(plan) == [self.requests[name].prompt_token_ids for name in expected]
            deltas = self.scheduler.update(self._run(plan))
        else:
            deltas, steps, computed, failed = list[RequestDelta](), self.scheduler.in_flight, 0, 0
            assert [row.group.request.request_id for row in steps.oldest.rows] == expected
            steps.split()
            while steps:
                if self.scheduler.skip():  # its request has ended in an earlier part
                    continue
                plan, rows = steps.plan(steps.oldest), steps.oldest.rows
                if not any(row.group.request.request_id in faults for row in rows):
                    deltas += self.scheduler.update(self._run(plan))
                    computed += 1
                elif len(rows) > 1:
                    assert steps.split()
                else:
                    deltas += self.scheduler.fail("it broke")
                    failed += 1
            self.events["apart"] += computed > 0 < failed
        self._deliver(deltas, expected, faults or set())
        self.check()

    def _expected(self, limit: StepLimit) -> list[str]:
        """Which inputs are read in this step: in order, as many as fit, the first however long it is."""
        tokens = min(self.config.max_num_batched_tokens, max(limit.tokens, limit.least, 1))
        work, chosen = max(limit.work, limit.least), list[str]()
        for _, _, name in sorted(self.queue):
            if name in self.ends:
                continue
            count = len(self.requests[name].prompt_token_ids)
            cost = count + limit.costs.pair * count**2
            fits = count <= tokens and cost <= work
            if (chosen and not fits) or len(chosen) == self.config.max_num_seqs:
                self.events["waited"] += 1
                break
            self.events["alone"] += not fits
            tokens, work = tokens - count, work - cost
            chosen.append(name)
        return chosen

    def _read(self, plan: StepPlan) -> list[tuple[int, ...]]:
        """The inputs of a plan, which is one of whole inputs without pages."""
        counts = np.diff(plan.query_start)
        assert plan.unchunked
        assert plan.sampling is None
        assert plan.encoder is None
        assert plan.slots.size == plan.block_tables.size == plan.copies.size == 0
        assert plan.context_lens.tolist() == counts.tolist()
        assert plan.positions.tolist() == [place for count in counts for place in range(count)]
        assert [row.row for row in plan.pooling] == list(range(plan.num_rows))
        assert all(row.complete and row.start == 0 and row.before is None for row in plan.pooling)
        most = self.config.max_num_batched_tokens
        assert plan.num_tokens <= most or plan.num_rows == 1, "only one that is alone may be longer than a step"
        self.events["several"] += plan.num_rows > 1
        return [tuple(part.tolist()) for part in np.split(plan.token_ids, plan.query_start[1:-1])]

    def _run(self, plan: StepPlan) -> StepResult:
        pooled = tuple(PooledRow(values=np.array([answer_to(tokens)], dtype=np.float32)) for tokens in self._read(plan))
        return dataclasses.replace(StepResult.empty(), pooled=pooled)

    def _deliver(self, deltas: list[RequestDelta], planned: list[str], faults: set[str]) -> None:
        late = {name for name, end in self.ends.items() if end == "deadline" and name in self._alive()}
        told = Counter(delta.request_id for delta in deltas)
        assert told == Counter([*planned, *late]), "each request that runs or is late has its last news, once"
        for delta in deltas:
            name = delta.request_id
            assert delta.finished
            assert not delta.choices
            assert (delta.error is None) == (delta.pooled is not None)
            if name in late:
                assert delta.error == "deadline"
            elif name in faults:
                assert delta.error == "it broke"
            else:
                assert delta.pooled is not None
                assert delta.pooled.values().tolist() == [answer_to(self.requests[name].prompt_token_ids)]
            self._end(name, delta.error or "answered")

    def _alive(self) -> set[str]:
        return {name for _, _, name in self.queue}

    def _end(self, name: str, how: str) -> None:
        self.queue = [entry for entry in self.queue if entry[2] != name]
        self.ends[name] = how
        self.events[how] += 1

    def check(self) -> None:
        """Between steps no request runs, and nothing is held."""
        self.scheduler.check_integrity()
        stats = self.scheduler.snapshot()
        assert stats.num_running == stats.pages_total == stats.pages_held == 0
        assert {group.request.request_id for group in self.scheduler.groups()} == self._alive()
        assert stats.num_waiting == len(self.queue)

    def drain(self) -> None:
        for _ in range(len(self.queue)):  # the first in line never waits
            self.step()
        assert not self.queue
        assert not self.scheduler.has_unfinished()
        assert self.ends.keys() == self.requests.keys()
        stats = self.scheduler.stats
        assert stats.num_finished == self.events["answered"]
        assert stats.num_aborted == self.events["aborted"] + self.events["deadline"]
        assert stats.num_preemptions == stats.generation_tokens == stats.prefix_queries == 0


lengths = st.one_of(st.integers(1, 9), st.integers(1, 40))
step_limits = st.one_of(
    st.just(UNLIMITED),
    st.builds(
        lambda pair, tokens, work, least: StepLimit(Costs(pair=pair), tokens=tokens, work=work, least=least),
        st.sampled_from([0.0, 0.01, 0.3]),
        st.integers(1, 60),
        st.integers(1, 80),
        st.integers(1, 9),
    ),
)


class WholeInputs(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(1, 1)

    @initialize(budget=st.integers(1, 32), seqs=st.sampled_from([1, 2, 3, 5, 32]))
    def start(self, budget: int, seqs: int) -> None:
        self.reader = Reader(budget, seqs)

    @rule(
        arrivals=st.lists(
            st.tuples(lengths, st.sampled_from([0, 0, 0, -1, 2]), st.sampled_from([None, None, None, 0.5, 2.0])),
            max_size=6,
        ),
        limits=st.lists(step_limits, max_size=3),
    )
    def go_on(self, arrivals: list[tuple[int, int, float | None]], limits: list[StepLimit]) -> None:
        for length, priority, patience in arrivals:
            number = len(self.reader.requests)
            tokens = [(number * 31 + place * 7) % 101 for place in range(length)]
            deadline = None if patience is None else self.reader.now + patience
            self.reader.add(whole_request(f"r{number}", tokens, priority=priority, deadline=deadline))
        for limit in limits:
            self.reader.now += 0.25
            self.reader.step(limit)

    @rule(kind=st.sampled_from(["abort", "fail", "time", "again"]), data=st.data())
    def trouble(self, kind: str, data: st.DataObject) -> None:
        alive = sorted(self.reader._alive())
        if kind == "time":
            self.reader.now += 1.0
        elif kind == "fail":
            self.reader.step(faults=data.draw(st.sets(st.sampled_from(alive), max_size=4)) if alive else set())
        elif alive and kind == "abort":
            self.reader.abort(data.draw(st.sampled_from(alive)))
        elif alive:
            with pytest.raises(InvalidRequestError, match="in use"):
                self.reader.scheduler.add(self.reader.requests[data.draw(st.sampled_from(alive))])

    def teardown(self) -> None:
        self.reader.drain()


TestWholeInputs = WholeInputs.TestCase
TestWholeInputs.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


def test_all_that_can_happen_to_whole_inputs_does() -> None:
    events: Counter[str] = Counter()
    for seed in range(15):
        rng = random.Random(seed)
        reader = Reader(rng.randint(8, 40), rng.choice([2, 4, 64]))
        for number in range(60):
            tokens = [rng.randrange(101) for _ in range(rng.choice([1, 3, 9, 9, 20, 60]))]
            deadline = reader.now + 1.0 if rng.random() < 0.1 else None
            reader.add(whole_request(f"r{number}", tokens, priority=rng.choice([0, 0, 1]), deadline=deadline))
            reader.now += 0.2
            if rng.random() < 0.1:
                reader.abort(rng.choice(sorted(reader._alive())))
            if rng.random() < 0.3:
                alive = sorted(reader._alive())
                reader.step(faults=set(rng.sample(alive, len(alive) // 4)) if rng.random() < 0.3 else None)
        reader.drain()
        events.update(reader.events)
    least = {"answered": 300, "aborted": 30, "deadline": 10, "it broke": 10, "apart": 5, "several": 50}
    least |= {"alone": 20, "waited": 50}
    assert all(events[name] >= count for name, count in least.items()), events


def test_a_long_input_is_neither_passed_nor_joined() -> None:
    reader = Reader(10, 64)
    for number, length in enumerate([4, 30, 4, 4, 4]):
        reader.add(whole_request(f"r{number}", [1] * length))
    steps = []
    while reader.queue:
        before = len(reader.queue)
        reader.step()
        steps.append(before - len(reader.queue))
    assert steps == [1, 1, 2, 1]


def test_output_that_is_not_a_number_ends_its_own_request() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, block_size=16, needs=SequenceNeeds(paged=False))
    scheduler = Scheduler(config, BlockPool(0))
    for name in "abc":
        scheduler.add(whole_request(name, [1, 2]))
    plan = scheduler.schedule()
    assert plan is not None
    values = [PooledRow(values=np.array([[1.0, value]], dtype=np.float32)) for value in (2.0, math.nan, math.inf)]
    deltas = scheduler.update(dataclasses.replace(StepResult.empty(), pooled=tuple(values)))
    assert [delta.finished for delta in deltas] == [True] * 3
    assert deltas[0].pooled is not None
    assert deltas[0].error is None
    for delta in deltas[1:]:
        assert delta.pooled is None
        assert "not a finite number" in str(delta.error)
    assert not scheduler.has_unfinished()


# ------------------------------------------------------------------ prompts that are pooled in chunks

MODEL = FakeModel()
FEATURES = 3
TEXTS = [[2 + (seed * 7 + i * i * 3 + i) % (VOCAB - 2) for i in range(60)] for seed in (1, 2)]


def hidden_states(states: Sequence[int]) -> torch.Tensor:
    """[T, features] of the hashes up to T tokens: numbers whose sums float64 holds exactly."""
    shifted = [[(state >> (16 * feature)) % 4096 / 64 - 32 for feature in range(FEATURES)] for state in states]
    return torch.tensor(shifted, dtype=torch.float32)


def pooled_alone(request: Request) -> np.ndarray:
    """The vector of a request's whole prompt, by plain arithmetic."""
    assert request.pooling is not None
    states, state = [], MODEL.root(request.cache_salt)
    for token in request.prompt_token_ids:
        state = MODEL.decode(state, token, 0)
        states.append(state)
    hidden, skip = hidden_states(states).double().numpy(), request.pooling.skip_tokens
    kept, places = hidden[skip:], np.arange(1, len(hidden) + 1, dtype=np.float64)[skip:, None]
    ways = {
        "mean": lambda: kept.mean(0),
        "cls": lambda: hidden[skip],
        "last": lambda: hidden[-1],
        "max": lambda: kept.max(0),
        "mean_sqrt_len": lambda: kept.sum(0) / np.sqrt(len(kept)),
        "weighted_mean": lambda: (places * kept).sum(0) / places.sum(),
    }
    vector: np.ndarray = np.concatenate([ways[mode]() for mode in request.pooling.modes]).astype(np.float32)
    return vector


class PoolingSimulator(Simulator):
    """The paged simulator, in which some requests are pooled by the engine's own pooler."""

    def __init__(self, **settings: object):
        super().__init__(model=MODEL, **settings)  # type: ignore[arg-type]
        self.pooler = Pooler(Pool(), lambda hidden: hidden)
        self.vectors: dict[str, np.ndarray] = {}
        self.pooling_events: Counter[str] = Counter()

    def execute(self, plan: StepPlan, rows: list | None = None) -> StepResult:
        result = super().execute(plan, rows)
        rows = self._rows() if rows is None else rows
        assert [row.row for row in plan.pooling] == [
            number for number, row in enumerate(rows) if row.group.request.pooling is not None
        ]
        for row in plan.pooling:
            request = rows[row.row].group.request
            part = "complete" if row.complete else "begun"
            self.pooling_events[part] += 1
            self.pooling_events["beside_sampling"] += plan.sampling is not None
            if row.complete and row.before is not None:
                self.pooling_events["chunked"] += 1
            if row.start == 0 and self.started.get(request.request_id):
                self.pooling_events["started_over"] += 1
            self.started[request.request_id] = row.start + 1
        hidden = hidden_states([int(state) for state in self.states.reshape(-1)[plan.slots]])
        return dataclasses.replace(result, pooled=self.pooler.pool(hidden, plan))

    @property
    def started(self) -> dict[str, int]:
        """Where the last part of each request's input that was computed began."""
        return self.__dict__.setdefault("_started", {})

    def _deliver(self, deltas: Sequence[RequestDelta]) -> None:
        others = []
        for delta in deltas:
            request = self.requests[delta.request_id]
            if request.pooling is None:
                assert delta.pooled is None
                others.append(delta)
                continue
            assert delta.request_id not in self.over, "news after the end"
            assert delta.finished
            assert not delta.choices
            self.over.add(delta.request_id)
            if delta.num_cached_tokens:
                assert not request.pooling.needs_all
                assert delta.num_cached_tokens % self.size == 0
                assert delta.num_cached_tokens < len(request.prompt_token_ids)
                self.pooling_events["hits"] += 1
            if delta.pooled is None:
                assert delta.error in ("it broke", "deadline")
                self.pooling_events["ended"] += 1
            else:
                assert delta.error is None
                self.vectors[delta.request_id] = delta.pooled.values()[0]
        super()._deliver(others)

    def compare(self) -> None:
        every = self.requests
        self.requests = {name: request for name, request in every.items() if request.pooling is None}
        super().compare()
        for name, request in every.items():
            if name in self.vectors:
                assert self.vectors[name].tolist() == pooled_alone(request).tolist(), request
                self.pooling_events["compared"] += 1
                assert request.pooling is not None
                self.pooling_events.update(request.pooling.modes)


WAYS: list[tuple[PoolingMode, ...]] = [
    ("last",), ("mean",), ("mean",), ("cls",), ("max",), ("mean_sqrt_len",), ("weighted_mean",), ("cls", "mean", "max"),
]  # fmt: skip


def random_request(rng: random.Random, name: str) -> Request:
    text = rng.choice(TEXTS)[: rng.choice([1, 4, 9, 17, 25, 40])]
    text = text + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))]
    terms = {"priority": rng.choice([0, 0, 0, -1, 1]), "cache_salt": rng.choice([None, None, "a"])}
    if rng.random() < 0.5:
        how = {"n": rng.randint(1, 3), "temperature": 1.0, "seed": 1} if rng.random() < 0.5 else {"num_beams": 3}
        return make_request(name, text, max_tokens=rng.randint(1, 12), **terms, **how)
    pooling = Pooling(task="embed", modes=rng.choice(WAYS), skip_tokens=rng.choice([0, 0, 3]) if len(text) > 3 else 0)
    return dataclasses.replace(make_request(name, text, max_tokens=1, **terms), pooling=pooling)


@pytest.mark.slow
@pytest.mark.parametrize("windows", [[None], [3, 9, 20]], ids=["all", "windows"])
def test_prompts_are_pooled_in_a_crowd_as_alone(windows: list[int | None]) -> None:
    """Chunks, prefix hits, preemptions, aborts and failing steps change no vector by a bit, and did happen."""
    events: Counter[str] = Counter()
    for seed in range(15):
        rng = random.Random(seed)
        simulator = PoolingSimulator(
            num_pages=rng.randint(20, 30) if windows == [None] else rng.randint(16, 20),
            block_size=rng.randint(2, 4),
            max_num_seqs=rng.randint(4, 9),
            max_num_batched_tokens=rng.randint(9, 20),
            caching=seed % 4 != 0,
            window=rng.choice(windows),
        )
        with simulator as sim:
            for number in range(40):
                request = random_request(rng, f"r{number}")
                try:
                    sim.add(request)
                except InvalidRequestError:
                    events["refused"] += 1
                for _ in range(rng.choice([0, 0, 1, 2, 8])):
                    sim.step()
                alive = [name for name in sim.requests if name not in sim.over]
                if alive and rng.random() < 0.1:
                    sim.abort(rng.choice(alive))
                if rng.random() < 0.1:
                    sim.fail_apart(rng.sample("0123456789", 3))
            sim.drain()
            sim.compare()
        events.update(sim.pooling_events)
        events.update(preemptions=sim.scheduler.stats.num_preemptions)
    least = {"preemptions": 24, "chunked": 40, "started_over": 3, "hits": 3, "ended": 1}
    least |= {
        "beside_sampling": 80,
        "compared": 120,
        "mean": 40,
        "last": 16,
        "cls": 8,
        "max": 8,
        "mean_sqrt_len": 4,
        "weighted_mean": 4,
    }
    assert all(events[name] >= count for name, count in least.items()), events


def test_a_mean_takes_no_prefix_hits_and_leaves_pages_for_others() -> None:
    """Pages that a pooled prompt has filled serve a later request of any kind that needs no earlier hidden states."""
    with PoolingSimulator(num_pages=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=8) as sim:
        hits = []
        for number, modes in enumerate([("mean",), ("mean",), ("last",), ("last", "mean"), None]):
            request = make_request(f"r{number}", TEXTS[0][:30], max_tokens=2)
            if modes is not None:
                request = dataclasses.replace(request, pooling=Pooling(task="embed", modes=modes))
            before = sim.scheduler.stats.prefix_hits
            sim.add(request)
            sim.drain()
            hits.append(sim.scheduler.stats.prefix_hits - before)
        sim.compare()
    assert hits == [0, 0, 28, 0, 28]
    assert sim.pooling_events["chunked"] >= 3


def test_an_input_too_long_for_the_pages_is_refused() -> None:
    with PoolingSimulator(num_pages=5, block_size=4, max_num_seqs=4, max_num_batched_tokens=8) as sim:
        fitting = dataclasses.replace(make_request("a", TEXTS[0][:20]), pooling=Pooling(task="embed", modes=("mean",)))
        with pytest.raises(InvalidRequestError, match=r"input of 21 tokens needs 6 pages.*has 5") as refusal:
            sim.add(dataclasses.replace(fitting, prompt_token_ids=tuple(TEXTS[0][:21])))
        assert refusal.value.param == "input"
        sim.add(fitting)
        sim.drain()
        sim.compare()
    assert sim.pooling_events["compared"] == 1


class CountingSimulator(PoolingSimulator):
    """Notes for each step how many tokens are of inputs to pool, and how many are not."""

    def execute(self, plan: StepPlan, rows: list | None = None) -> StepResult:
        found = super().execute(plan, rows)
        pooled = sum(row.count for row in self._rows() if row.group.request.pooling is not None)
        self.steps.append((pooled, plan.num_tokens - pooled))
        return found

    @property
    def steps(self) -> list[tuple[int, int]]:
        return self.__dict__.setdefault("_steps", [])


@pytest.mark.parametrize("lengths", [[200], [100, 100], [9] * 40], ids=["long", "two", "many"])
def test_inputs_to_pool_take_turns_with_other_work(lengths: list[int]) -> None:
    """In every second step others run alone, and a prompt that comes meanwhile has its turn there."""
    with CountingSimulator(num_pages=200, block_size=4, max_num_seqs=64, max_num_batched_tokens=10) as sim:
        sim.add(make_request("stream", [2, 3, 4], max_tokens=30))
        sim.step()
        for number, length in enumerate(lengths):
            sim.add(whole_request(f"pooled{number}", [2 + (number + place) % 9 for place in range(length)]))
        for _ in range(8):
            sim.step()
        assert sum(pooled > 0 for pooled, _ in sim.steps[1:]) == 4
        assert all(others == 1 for _, others in sim.steps[1:])
        sim.add(make_request("short", [5, 6, 7], max_tokens=3))
        for _ in range(6):
            sim.step()
        assert "short" in sim.over
        sim.drain()
        sim.compare()
        alone = [pooled for pooled, others in sim.steps if not others]
        assert all(count >= 9 for count in alone[:-1]), "without other work no step is left empty"


def test_inputs_to_pool_get_half_of_the_work_beside_others() -> None:
    """So that a step that is slower than expected holds up no answer for long."""
    with CountingSimulator(num_pages=200, block_size=4, max_num_seqs=64, max_num_batched_tokens=100) as sim:
        schedule, limit = sim.scheduler.schedule, StepLimit(Costs(), work=21.0, least=1.0)
        sim.scheduler.schedule = lambda _=UNLIMITED: schedule(limit)  # type: ignore[method-assign]
        sim.add(make_request("stream", [2, 3, 4], max_tokens=12))
        sim.step()
        sim.add(whole_request("pooled", [2 + place % 9 for place in range(180)]))
        for _ in range(6):
            sim.step()
        beside = [pooled for pooled, others in sim.steps[1:] if others and pooled]
        assert beside == [10] * 3, "half of 20, which the stream leaves"
        sim.drain()
        sim.compare()
        alone = [pooled for pooled, others in sim.steps if not others]
        assert alone[0] == 21, "the whole where nothing runs beside them"
