"""The scheduler under any order of events, in pools so small that requests are preempted all the time."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from paged_simulator import VOCAB, FakeModel, Simulator, make_request
from support.ahead import AheadSimulator

from engine.errors import InvalidRequestError
from engine.interface.request import MAX_PRIORITY, Request

pytestmark = pytest.mark.slow

MODEL = FakeModel()
EOS, STOP = 0, 1
# Prompts are cut from these, so that they share beginnings.
TEXTS = [[2 + (seed * 7 + i * i * 3 + i) % (VOCAB - 2) for i in range(40)] for seed in (1, 2)]
# Encoder inputs: equal ones meet, and one may be the beginning of another.
INPUTS = [tuple(text[:length]) for text, length in ((TEXTS[0], 1), (TEXTS[0], 5), (TEXTS[0], 12), (TEXTS[1], 8))]


def may_fit(request: Request, simulator: Simulator) -> bool:
    """Does the request fit into the empty pool in the worst case? Counted page by page."""
    decoding, size = request.decoding, simulator.size
    width = max(decoding.n, decoding.num_beams)
    if width > simulator.config.max_num_seqs:
        return False
    prompt, pages = len(request.prompt_token_ids), 0
    for start in range(0, prompt + decoding.max_tokens - 1, size):
        pages += 1 if start + size <= prompt else width
    if simulator.config.window is not None:
        # One token of a window in its first page, one of a step's in its last page, all others between.
        slots = width * (size + simulator.config.window - 2 + size - 1) + simulator.config.max_num_batched_tokens
        pages = min(pages, slots // size)
    encoder_input = len(request.encoder_token_ids)
    fits = encoder_input <= simulator.config.max_num_batched_tokens
    return fits and pages + len(range(0, encoder_input, size)) <= simulator.pool.total


@st.composite
def requests(draw: st.DrawFn) -> Request:
    prompt = draw(st.sampled_from(TEXTS))[: draw(st.sampled_from([*range(1, 13), *range(1, 13), 30]))]
    prompt = prompt + draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))
    max_tokens = draw(st.integers(1, 12))
    kind = draw(st.sampled_from(["greedy", "sample", "beam"]))
    how: dict[str, object] = {}
    if kind == "sample":
        how = {
            "n": draw(st.integers(1, 4)),
            "temperature": draw(st.sampled_from([0.7, 1.5])),
            "seed": draw(st.integers(0, 9)),
        }
    elif kind == "beam":
        beams = draw(st.integers(2, 4))
        how = {
            "num_beams": beams,
            "n": draw(st.integers(1, beams)),
            "length_penalty": draw(st.sampled_from([-1.0, 0.0, 1.0, 2.0])),
            "early_stopping": draw(st.sampled_from([True, False, "never"])),
        }
    return make_request(
        "?",
        prompt,
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_ids=draw(st.sampled_from([frozenset(), frozenset({EOS}), frozenset({EOS, STOP})])),
        eos_ids=frozenset({EOS}),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0, 2])),
        priority=draw(st.sampled_from([0, 0, 0, -1, 1, MAX_PRIORITY])),
        cache_salt=draw(st.sampled_from([None, None, "a"])),
        deadline=draw(st.sampled_from([None, None, None, None, 3.0, 10.0])),
        encoder_token_ids=draw(st.sampled_from([(), (), (), *INPUTS])),
        tenant=draw(st.sampled_from([None, None, "a", "b", "c"])),
        **how,
    )


class SchedulerMachine(RuleBasedStateMachine):
    kind: type[Simulator] = Simulator

    def __init__(self) -> None:
        super().__init__()
        self.simulator: Simulator | None = None

    @initialize(
        num_pages=st.integers(6, 20),
        block_size=st.integers(1, 3),
        max_num_seqs=st.integers(2, 7),
        extra_budget=st.integers(0, 8),
        caching=st.booleans(),
        window=st.one_of(st.none(), st.integers(2, 9)),
        drafts=st.booleans(),
    )
    def start(
        self,
        num_pages: int,
        block_size: int,
        max_num_seqs: int,
        extra_budget: int,
        caching: bool,
        window: int | None,
        drafts: bool,
    ) -> None:
        self.simulator = self.kind(
            num_pages=num_pages,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            caching=caching,
            model=MODEL,
            window=window,
            drafts=drafts,
        )
        self.simulator.__enter__()

    @property
    def sim(self) -> Simulator:
        assert self.simulator is not None
        return self.simulator

    def alive(self) -> list[str]:
        return [request_id for request_id in self.sim.requests if request_id not in self.sim.over]

    # One rule for all troubles: hypothesis picks rules evenly, and most of the time there is none.
    @rule(arrivals=st.lists(requests(), max_size=4), steps=st.integers(1, 8))
    def go_on(self, arrivals: list[Request], steps: int) -> None:
        for request in arrivals:
            self.add(request)
        for _ in range(steps):
            self.sim.now += 0.25
            self.sim.step()

    @rule(arrivals=st.lists(requests(), min_size=2, max_size=6))
    def rush(self, arrivals: list[Request]) -> None:
        for request in arrivals:
            self.add(request)
            self.sim.step()

    @rule(kind=st.sampled_from(["abort", "abort", "choice", "choice", "fail", "time"]), data=st.data())
    def trouble(self, kind: str, data: st.DataObject) -> None:
        alive = self.alive()
        if kind == "fail":
            if at_fault := data.draw(st.sets(st.sampled_from("0123456789"), max_size=9)):
                self.sim.fail_apart(at_fault)
            else:
                self.sim.fail()
        elif kind == "time":
            self.sim.now += 2.0
        elif alive:
            request_id = data.draw(st.sampled_from(alive))
            if kind == "abort":
                assert self.sim.abort(request_id)
            else:
                answers = self.sim.answers[request_id]
                choice = data.draw(st.integers(0, len(answers) - 1))
                over = answers[choice].aborted or answers[choice].finish_reason is not None
                assert not (self.sim.abort(request_id, choice) and over)

    def add(self, request: Request) -> None:
        deadline = None if request.deadline is None else self.sim.now + request.deadline
        named = dataclasses.replace(request, request_id=f"r{len(self.sim.requests)}", deadline=deadline)
        if may_fit(named, self.sim):
            self.sim.add(named)
        else:
            with pytest.raises(InvalidRequestError):
                self.sim.add(named)
        self.sim.check()

    def teardown(self) -> None:
        if self.simulator is None:
            return
        try:
            self.sim.drain()
            self.sim.compare()
        finally:
            self.simulator.__exit__(None, None, None)


class AheadMachine(SchedulerMachine):
    """The same one step ahead: whatever happens, happens with a step in flight."""

    kind = AheadSimulator


TestSchedulerMachine, TestAheadMachine = SchedulerMachine.TestCase, AheadMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=75, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
TestAheadMachine.settings = settings(TestSchedulerMachine.settings, max_examples=40)


def random_request(
    rng: random.Random, name: str, longest: int, encoder_input: tuple[int, ...] = (), tenant: str | None = None
) -> Request:
    """Like `requests`, for runs longer than hypothesis makes them."""
    kind = rng.choice(["greedy", "sample", "beam"])
    how: dict[str, object] = {}
    if kind == "sample":
        how = {"n": rng.randint(1, 4), "temperature": 1.0, "seed": rng.randrange(2**64)}
    elif kind == "beam":
        beams = rng.randint(2, 5)
        how = {
            "num_beams": beams,
            "n": rng.randint(1, beams),
            "length_penalty": rng.choice([-0.5, 0.0, 1.0, 1.7]),
            "early_stopping": rng.choice([True, False, "never"]),
        }
    return make_request(
        name,
        rng.choice(TEXTS)[: rng.randint(1, longest)],
        max_tokens=rng.randint(1, 14),
        stop_ids=frozenset({EOS, STOP}) if rng.random() < 0.7 else frozenset(),
        eos_ids=frozenset({EOS}),
        logprobs=rng.choice([None, None, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        priority=rng.choice([0, 0, 0, 0, -1, 1, MAX_PRIORITY]),
        cache_salt=rng.choice([None, None, "a", "b"]),
        encoder_token_ids=encoder_input,
        tenant=tenant,
        **how,
    )


CROWDS = pytest.mark.parametrize(
    ("windows", "inputs"), [([None], [()]), ([3, 6, 12], [()]), ([None], [(), *INPUTS, tuple(TEXTS[1][:18])])]
)


def run_crowds(
    kind: type[Simulator],
    windows: list[int | None],
    inputs: list[tuple[int, ...]],
    seeds: int,
    faults: float,
    *,
    drafts: bool = False,
) -> Counter[str]:
    """Thousands of steps over small pools: everybody's answer is the one that he gets alone. What happened."""
    events: Counter[str] = Counter()
    for seed in range(seeds):
        rng, chooser = random.Random(seed), random.Random(-seed)
        simulator = kind(
            num_pages=rng.randint(13, 22),
            block_size=rng.randint(2, 4),
            max_num_seqs=rng.randint(5, 12),
            max_num_batched_tokens=rng.randint(12, 24),
            caching=seed % 4 != 0,
            model=MODEL,
            window=windows[seed % len(windows)],
            drafts=drafts,
        )
        with simulator as sim:
            for number in range(40):
                longest = 20 if windows == [None] else 40
                if number == 0 or chooser.random() < 0.5:
                    encoder_input = chooser.choice(inputs)
                tenant = chooser.choice([None, "a", "b"]) if seed % 2 else None
                request = random_request(rng, f"r{number}", longest, encoder_input, tenant)
                if may_fit(request, sim):
                    sim.add(request)
                for _ in range(rng.choice([0, 0, 1, 2, 8])):
                    sim.step()
                alive = [request_id for request_id in sim.requests if request_id not in sim.over]
                if alive and rng.random() < 0.1:
                    request_id = rng.choice(alive)
                    sim.abort(request_id, rng.choice([None, 0]))
                if rng.random() < 0.02:
                    sim.fail()
                if faults and chooser.random() < faults:
                    sim.fail_apart(chooser.sample("0123456789", 3))
            sim.drain()
            sim.compare()
        stats = sim.scheduler.stats
        events.update(sim.events)
        events.update(preemptions=stats.num_preemptions, copies=stats.num_page_copies, hits=stats.prefix_hits)
        events.update(finished=stats.num_finished, aborted=stats.num_aborted, steps=stats.num_steps)
        events.update(encoder_runs=stats.num_encoder_runs, encoder_hits=stats.num_encoder_hits)
        events.update(ahead=stats.num_steps_ahead)
        events.update(drafted=stats.num_draft_tokens, accepted=stats.num_accepted_draft_tokens)
        events.update(sim.ahead if isinstance(sim, AheadSimulator) else {})
    return events


@CROWDS
def test_crowds_get_the_answers_they_get_alone(windows: list[int | None], inputs: list[tuple[int, ...]]) -> None:
    """And everything that can happen to a request did happen."""
    plain = windows == [None] and inputs == [()]
    events = run_crowds(Simulator, windows, inputs, 40 if plain else 24, 0.0 if inputs == [()] else 0.15)
    least = {
        "preemptions": 200,
        "copies": 600,
        "hits": 1000,
        "chunked": 100,
        "beam_with_others": 300,
        "mixed_draws": 100,
        "salted_hits": 20,
        "finished": 400,
        "aborted": 30,
        "steps": 1500,
    }
    if inputs != [()]:
        encoder = {
            "encoder_runs": 300,
            "encoder_hits": 100,
            "inputs_found": 40,
            "encoded_beside_decoding": 100,
            "encoded_for_several": 5,
            "encoded_again": 10,
            "encoded_over_budget": 2,
            "encoder_pages_shared": 100,
            "encoder_pages_found_again": 50,
            "apart": 12,
        }
        least = {name: count // 3 for name, count in least.items()} | encoder
    if windows != [None]:
        least = {name: count // 3 for name, count in least.items()} | {"unseen": 10_000, "late_hits": 30}
    assert all(events[name] >= count for name, count in least.items()), events


@CROWDS
def test_crowds_one_step_ahead(windows: list[int | None], inputs: list[tuple[int, ...]]) -> None:
    """Steps are planned before the answer of the one in flight is known, and break at their launch or later."""
    events = run_crowds(AheadSimulator, windows, inputs, 10, 0.25)
    least = {
        "steps": 700,
        "ahead": 300,
        "tokens not known": 400,
        "searches ahead": 100,
        "beams that parted ahead": 60,
        "new pages ahead": 80,
        "as the host found": 300,
        "rows for nothing": 80,
        "left to the next step": 30,
        "drained": 40,
        "broken at the launch": 15,
        "broken later": 15,
        "broken ahead": 15,
        "planned again": 4,
        "copies of broken steps": 40,
        "preemptions": 8,
        "copies": 60,
        "hits": 100,
        "beam_with_others": 50,
        "finished": 80,
    }
    assert all(events[name] >= count for name, count in least.items()), events


@CROWDS
@pytest.mark.parametrize("kind", [Simulator, AheadSimulator])
def test_crowds_whose_tokens_are_drafted(
    kind: type[Simulator], windows: list[int | None], inputs: list[tuple[int, ...]]
) -> None:
    """Drafts that are right, partly right and wrong change no answer, whatever else happens; pages that wrong ones had
    are given back."""
    events = run_crowds(kind, windows, inputs, 12, 0.1, drafts=True)
    least = {
        "all drafts right": 100,
        "some drafts right": 35,
        "no drafts right": 15,
        "drafts of several": 20,
        "drafted": 400,
        "accepted": 300,
        "preemptions": 8,
        "copies": 60,
        "hits": 50,
        "finished": 80,
    }
    assert all(events[name] >= count for name, count in least.items()), events
    assert events["accepted"] < events["drafted"]
