"""Encoder inputs: which requests get their pages and when the encoder runs, rule by rule."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from paged_simulator import VOCAB, Simulator, make_request, small

from engine.errors import InvalidRequestError
from engine.interface.outputs import RequestDelta
from engine.scheduling.budget import UNLIMITED, Costs, StepLimit, StepWork
from engine.scheduling.encoder_input import EncoderInput
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.needs import SequenceNeeds
from engine.scheduling.plan import StepPlan
from engine.scheduling.sequence import SequenceGroup, worst_case_pages
from engine.scheduling.step import NextStep

KINDS: list[dict[str, Any]] = [{}, {"n": 3, "temperature": 1.0, "seed": 4}, {"num_beams": 3, "n": 2}]


class Watched(Simulator):
    """Keeps the plans of all steps, which may have a limit."""

    limit: StepLimit = UNLIMITED

    def _schedule(self) -> StepPlan | None:
        schedule = self.scheduler.schedule
        self.scheduler.schedule = lambda limit=UNLIMITED: schedule(self.limit)  # type: ignore[method-assign]
        try:
            plan = super()._schedule()
        finally:
            self.scheduler.schedule = schedule  # type: ignore[method-assign]
        self.plan = plan
        self.encoded = [] if plan is None or plan.encoder is None else [len(plan.encoder.token_ids)]
        return plan

    def steps(self) -> list[tuple[int, int]]:
        """Tokens of encoder and decoder of each step until nothing is left."""
        sizes = []
        for _ in range(self.step_bound()):
            self.step()
            if self.plan is not None:
                sizes.append((sum(self.encoded), self.plan.num_tokens))
        self.drain()
        self.compare()
        return sizes

    @property
    def runs(self) -> tuple[int, int]:
        """How often the encoder ran, and how often it did not have to."""
        return self.scheduler.stats.num_encoder_runs, self.scheduler.stats.num_encoder_hits


simulator = partial(small, kind=Watched, budget=32)


def words(length: int, start: int = 2) -> tuple[int, ...]:
    return tuple(2 + (start + 5 * i + i // 7) % (VOCAB - 2) for i in range(length))


def add(sim: Simulator, name: str, source: tuple[int, ...] = words(10), begin: int = 1, **how: Any) -> None:
    sim.add(make_request(name, words(begin), encoder_token_ids=source, **how))


def group_of(sim: Simulator, name: str) -> SequenceGroup:
    return next(group for group in sim.scheduler.groups() if group.request.request_id == name)


def memory_of(sim: Simulator, name: str) -> EncoderInput:
    memory = group_of(sim, name).encoder_input
    assert memory is not None
    return memory


def preempt(sim: Simulator, name: str) -> None:
    sim.scheduler._preempt(NextStep(sim.config.max_num_batched_tokens), group_of(sim, name))
    sim.check()


def evict(sim: Simulator, count: int) -> None:
    """Evict so many pages that no request holds, least recently used first."""
    pages = sim.pool.reserve(sim.pool.num_free + count)
    assert pages is not None
    sim.pool.free(pages)
    sim.check()


# ------------------------------------------------------------------ refused at the door


class TestRefusals:
    def test_an_input_longer_than_a_step(self) -> None:
        with simulator(budget=20) as sim:
            add(sim, "fits", words(20))
            with pytest.raises(InvalidRequestError) as caught:
                add(sim, "r", words(21))
            assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
            assert all(part in str(caught.value) for part in ("21 tokens", "at most 20", "--max-num-batched-tokens"))
            assert sim.steps()[0] == (20, 1)

    def test_pages_of_both(self) -> None:
        """13 tokens of the encoder take 4 pages, 3 + 9 - 1 of the decoder 3 for each of two beams."""
        with simulator(num_pages=10) as sim:
            add(sim, "fits", words(13), 3, max_tokens=9, num_beams=2)
            sim.drain()
        with simulator(num_pages=9) as sim:
            with pytest.raises(InvalidRequestError) as caught:
                add(sim, "r", words(13), 3, max_tokens=9, num_beams=2)
            parts = ("10 pages", "13 encoder tokens", "3 prompt tokens", "2 sequences", "has 9")
            assert all(part in str(caught.value) for part in parts), str(caught.value)

    @pytest.mark.parametrize("caching", [False, True])
    @pytest.mark.parametrize("how", [{}, {"n": 3, "temperature": 1.5, "seed": 2}, {"num_beams": 3}])
    def test_a_pool_of_exactly_that_is_enough(self, how: dict[str, Any], caching: bool) -> None:
        """To the end, beside others, and to come back after a preemption at any moment."""
        width = 3 if how else 1
        for interruption in range(1, 12):
            pages = 3 + worst_case_pages(2, 9, width, 4)
            with simulator(num_pages=pages, budget=12, max_num_seqs=5, caching=caching) as sim:
                add(sim, "r", words(12), 2, max_tokens=9, **how)
                add(sim, "younger", words(12, 5), max_tokens=4)
                for _ in range(interruption):
                    sim.step()
                if "r" not in sim.over:
                    preempt(sim, "r")
                    add(sim, "urgent", words(12, 7), max_tokens=2, priority=-1)
                sim.drain()
                sim.compare()

    def test_how_many_requests_fit(self) -> None:
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, block_size=4)
        assert config.fitting(10, 30) == 10.0
        assert config.fitting(10, 30, 13) == 30 / 7
        windowed = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=32, block_size=4, needs=SequenceNeeds(window=5)
        )
        assert windowed.fitting(1000, 60, 13) == (60 * 4 - 32) / (5 - 1 + 6 + 16)


# ------------------------------------------------------------------ one run for all


class TestShared:
    @pytest.mark.parametrize("how", KINDS)
    def test_beams_and_answers_read_the_same_pages(self, how: dict[str, Any]) -> None:
        with simulator() as sim:
            add(sim, "r", max_tokens=6, min_tokens=6, **how)
            sim.step()
            sim.step()
            pages = memory_of(sim, "r").pages
            assert [sim.pool.references(page) for page in pages] == [1, 1, 1]
            assert sim.plan is not None
            assert sim.plan.cross is not None
            assert sim.plan.cross.tables.tolist() == [pages] * len(group_of(sim, "r").sequences)
            sim.drain()
            sim.compare()
            assert sim.runs == (1, 0)

    def test_equal_inputs_of_one_step_are_encoded_once(self) -> None:
        with simulator() as sim:
            for name, how in zip("abc", KINDS, strict=True):
                add(sim, name, max_tokens=5, **how)
            sim.step()
            assert sim.encoded == [10]
            assert memory_of(sim, "a").pages == memory_of(sim, "b").pages == memory_of(sim, "c").pages
            add(sim, "d", max_tokens=2)
            sim.drain()
            sim.compare()
            assert sim.runs == (1, 3)
            assert sim.pool.num_free + sim.pool.num_cached == sim.pool.total

    def test_a_beginning_is_no_hit(self) -> None:
        with simulator() as sim:
            for length in (12, 8, 11, 13):
                add(sim, f"r{length}", words(length))
                sim.drain()
            sim.compare()
            assert sim.runs == (4, 0)

    def test_salts_do_not_meet(self) -> None:
        with simulator() as sim:
            for name, salt in (("a", None), ("b", "x"), ("c", "x"), ("d", "y")):
                add(sim, name, cache_salt=salt)
                sim.step()
            sim.drain()
            sim.compare()
            assert sim.runs == (3, 1)

    def test_inputs_and_decoders_do_not_meet(self) -> None:
        """A prompt of the same tokens without an encoder, and decoders of equal tokens behind other inputs."""
        with simulator() as sim:
            add(sim, "a", words(8), 9)
            sim.drain()
            sim.add(make_request("b", words(9)))
            add(sim, "c", words(8, 3), 9)
            sim.drain()
            sim.compare()
            assert sim.cached_tokens == {}
            add(sim, "d", words(8), 9)
            sim.drain()
            assert sim.cached_tokens == {"d": 8}
            add(sim, "e", words(4), 9)
            sim.add(make_request("f", words(5)))
            sim.drain()
            sim.add(make_request("g", [*words(4), *words(9)]))
            sim.drain()
            sim.compare()
            assert sim.cached_tokens == {"d": 8, "f": 4, "g": 4}

    def test_a_scored_decoder_prompt_is_computed_but_its_input_is_not(self) -> None:
        with simulator() as sim:
            for name in ("a", "b"):
                add(sim, name, begin=9, prompt_logprobs=1)
                sim.drain()
            sim.compare()
            assert sim.cached_tokens == {}
            assert sim.runs == (1, 1)


# ------------------------------------------------------------------ some of the requests that share an input are gone


class TestGone:
    @pytest.mark.parametrize("who", ["a", "b"])
    @pytest.mark.parametrize("how", ["abort", "preempt", "expire"])
    def test_the_others_keep_the_pages(self, how: str, who: str) -> None:
        with simulator() as sim:
            for name in ("a", "b"):
                add(sim, name, max_tokens=6, min_tokens=6, deadline=1.0 if name == who and how == "expire" else None)
            sim.step()
            if how == "abort":
                sim.abort(who)
            elif how == "preempt":
                preempt(sim, who)
            else:
                sim.now = 2.0
            sim.step()
            sim.drain()
            sim.compare()
            assert sim.runs == (1, 2 if how == "preempt" else 1)

    @pytest.mark.parametrize("at_fault", ["0", "1", "01", "12"])
    def test_one_that_cannot_be_computed(self, at_fault: str) -> None:
        """Of three requests with one input any may fail; the encoder runs again for each, its pages are the others'."""
        with simulator() as sim:
            for name in ("r0", "r1", "r2"):
                add(sim, name, max_tokens=5)
            sim.fail_apart(at_fault)
            assert len(sim.over) == len(at_fault)
            add(sim, "later", max_tokens=2)
            sim.drain()
            sim.compare()
            assert sim.runs == (1, 3 - len(at_fault))

    def test_a_failed_step_leaves_nothing_to_be_found(self) -> None:
        with simulator() as sim:
            for name in ("r0", "r1"):
                add(sim, name)
            sim.fail_apart("01")
            assert sim.pool.num_free == sim.pool.total
            add(sim, "again")
            sim.fail()
            assert sim.pool.num_free == sim.pool.total
            add(sim, "r2")
            sim.drain()
            sim.compare()
            assert sim.runs == (1, 0)

    def test_one_that_is_preempted_in_the_step_that_was_to_encode_for_it(self) -> None:
        """The run is for the others then, or for no request at all."""
        with simulator() as sim:
            for name in ("a", "b"):
                add(sim, name)
            step, scheduler = NextStep(32), sim.scheduler
            step.begin_prompts()
            scheduler._admit(step)
            (run,) = step.encoder_runs.values()
            for name in ("a", "b"):
                assert run.encoder_input.pages == memory_of(sim, "b").pages
                scheduler._preempt(step, group_of(sim, name))
            assert step.encoder_runs == {}
            assert sim.pool.num_free == sim.pool.total
            sim.drain()
            sim.compare()


# ------------------------------------------------------------------ given up, found again, evicted


class TestPreempted:
    @pytest.mark.parametrize("caching", [False, True])
    @pytest.mark.parametrize("how", KINDS)
    def test_the_encoder_does_not_run_again(self, how: dict[str, Any], caching: bool) -> None:
        with simulator(caching=caching) as sim:
            add(sim, "r", max_tokens=9, min_tokens=9, **how)
            for _ in range(4):
                sim.step()
            pages = list(memory_of(sim, "r").pages)
            preempt(sim, "r")
            assert sim.pool.num_held == 0
            sim.step()
            assert memory_of(sim, "r").pages == pages
            sim.drain()
            sim.compare()
            assert sim.runs == (1, 1)

    @pytest.mark.parametrize("how", KINDS)
    def test_the_decoders_pages_are_evicted_first(self, how: dict[str, Any]) -> None:
        with simulator() as sim:
            add(sim, "r", max_tokens=15, min_tokens=15, **how)
            for _ in range(13):
                sim.step()
            memory = memory_of(sim, "r")
            preempt(sim, "r")
            own = sim.pool.num_cached - 3
            assert own >= 3
            evict(sim, own)
            assert len(sim.pool.match(memory.hashes)) == sim.pool.num_cached == 3
            computed = sim.scheduler.stats.computed_tokens
            sim.step()
            assert sim.runs == (1, 1)
            assert sim.scheduler.stats.computed_tokens > computed
            sim.drain()
            sim.compare()

    @pytest.mark.parametrize("caching", [False, True])
    def test_without_one_of_its_pages_it_is_encoded_whole(self, caching: bool) -> None:
        """What is left of the old ones is free, not kept beside the new ones."""
        with simulator(caching=caching) as sim:
            add(sim, "r", max_tokens=9, min_tokens=9)
            sim.step()
            memory = memory_of(sim, "r")
            preempt(sim, "r")
            evict(sim, 1)
            assert sim.pool.num_cached == 2
            sim.step()
            assert sim.encoded == [10]
            assert sim.pool.match(memory.hashes) == memory.pages
            assert (sim.pool.num_cached, sim.pool.num_held) == (0, 4)
            sim.drain()
            sim.compare()
            assert sim.runs == (2, 0)

    def test_being_half_of_an_input_keeps_no_page(self) -> None:
        """Requests that look for an input and do not find all of it leave the order of eviction as it is."""
        with simulator(num_pages=10) as sim:
            add(sim, "a", max_tokens=1)
            sim.drain()
            evict(sim, 1)
            add(sim, "b", words(4, 9), max_tokens=1)
            sim.drain()
            add(sim, "busy", words(12, 7), max_tokens=4, min_tokens=4)
            sim.step()
            order = list(sim.pool._queues[0])
            assert len(order) == 3
            add(sim, "waits", begin=17, max_tokens=1)
            sim.step()
            sim.step()
            assert memory_of(sim, "waits").pages == []
            assert list(sim.pool._queues[0]) == order
            evict(sim, 2)
            assert list(sim.pool._queues[0]) == order[2:]
            sim.drain()
            sim.compare()

    @pytest.mark.parametrize("how", KINDS)
    def test_a_decoder_whose_pages_outlived_its_input(self, how: dict[str, Any]) -> None:
        """All sequences resume with one token each, beside an input that fills the step: they run in that step."""
        with simulator(budget=10) as sim:
            add(sim, "r", begin=8, max_tokens=9, min_tokens=9, **how)
            group = group_of(sim, "r")
            while not (group.started and group.common_prefix() >= 8):
                sim.step()
            preempt(sim, "r")
            memory = memory_of(sim, "r")
            sim.pool.forget(memory.hashes)
            sim.step()
            assert sim.encoded == [10]
            assert group.sequences[0].num_computed >= 8
            sim.drain()
            sim.compare()
            assert sim.runs == (2, 0)
            assert sim.events["encoded_over_budget"] > 0

    def test_its_own_cached_pages_make_no_room_for_its_input(self) -> None:
        """A decoder's pages that it finds are taken up before pages for the input are made free."""
        with simulator(num_pages=8, budget=16) as sim:
            add(sim, "r", words(12), begin=13, max_tokens=4, min_tokens=4)
            sim.step()
            sim.step()
            preempt(sim, "r")
            sim.pool.forget(memory_of(sim, "r").hashes)
            taken = sim.pool.reserve(sim.pool.num_free - 2)
            assert taken is not None
            sim.scheduler._groups["outside"] = outside = SequenceGroup(make_request("outside", words(1)), 99, b"")
            outside.sequences[0].table.extend(taken)
            assert sim.scheduler.schedule() is None  # six pages are available, and seven are needed
            sim.pool.free(taken)
            del sim.scheduler._groups["outside"]
            sim.step()
            assert group_of(sim, "r").sequences[0].num_published >= 3
            assert sim.encoded == [12]
            sim.drain()
            sim.compare()


class TestWithoutCaching:
    def test_no_other_request_finds_them(self) -> None:
        with simulator(caching=False) as sim:
            for name in ("a", "b"):
                add(sim, name, max_tokens=5)
            sim.step()
            assert not set(memory_of(sim, "a").pages) & set(memory_of(sim, "b").pages)
            sim.drain()
            sim.compare()
            assert sim.runs == (2, 0)
            assert sim.pool.num_free == sim.pool.total

    @pytest.mark.parametrize("end", ["abort", "expire", "finish"])
    @pytest.mark.parametrize("evicted", [0, 1])
    def test_nothing_is_left_when_it_is_over(self, evicted: int, end: str) -> None:
        """Ended while it runs or while it waits, with all of its pages or only some of them."""
        for waits in (False, True):
            with simulator(caching=False) as sim:
                add(sim, "r", max_tokens=9, deadline=1.0 if end == "expire" else None)
                sim.step()
                if waits:
                    preempt(sim, "r")
                    evict(sim, evicted)
                    assert sim.pool.num_cached == 3 - evicted
                if end == "abort":
                    sim.abort("r")
                sim.now = 2.0
                sim.drain()
                sim.compare()
                assert sim.pool.num_free == sim.pool.total


# ------------------------------------------------------------------ when the encoder may run


class TestBudget:
    def test_encoder_tokens_count(self) -> None:
        """Two inputs of 10 and their first tokens fill a step of 22; a third one waits."""
        with simulator(budget=22) as sim:
            for number in range(3):
                add(sim, f"r{number}", words(10, number), max_tokens=2)
            assert sim.steps() == [(20, 2), (10, 3), (0, 1)]

    def test_an_input_leaves_room_for_every_sequence(self) -> None:
        with simulator(budget=21) as sim:
            for number in range(2):
                add(sim, f"r{number}", words(10, number), max_tokens=2)
            assert sim.steps() == [(10, 1), (10, 2), (0, 1)]

    @pytest.mark.parametrize("length", [15, 16])
    def test_the_longest_input_does_not_wait_for_decoding_rows(self, length: int) -> None:
        with simulator(budget=16, max_num_seqs=8) as sim:
            for number in range(7):
                add(sim, f"r{number}", words(1, number), max_tokens=30, min_tokens=30)
            for _ in range(3):
                sim.step()
            add(sim, "long", words(length), max_tokens=3)
            sim.step()
            assert sim.encoded == [length]
            assert sim.plan is not None
            assert sim.plan.num_tokens == 8
            assert sim.events["encoded_over_budget"] == 1
            sim.drain()
            sim.compare()

    def test_it_waits_only_for_prompts_that_came_before(self) -> None:
        with simulator(budget=16) as sim:
            add(sim, "first", words(4), 40, max_tokens=3)
            add(sim, "long", words(16, 3), max_tokens=3)
            for number in range(5):
                add(sim, f"late{number}", words(3, number), max_tokens=2)
            assert sim.steps()[:5] == [(4, 12), (0, 16), (0, 12), (16, 2), (9, 5)]

    def test_urgent_inputs_that_push_others_out_keep_to_the_budget(self) -> None:
        """Each takes the place of a decoding row; the second one still is not the first prompt of the step."""
        with simulator(budget=16, max_num_seqs=4) as sim:
            for number in range(4):
                add(sim, f"r{number}", words(2, number), max_tokens=9, min_tokens=9)
            for _ in range(4):
                sim.step()
            for number in range(3):
                add(sim, f"urgent{number}", words(16, number), max_tokens=2, priority=-1)
            sim.step()
            assert sim.encoded == [16]
            assert sim.steps()[:2] == [(16, 4), (16, 4)]

    def test_one_that_shares_a_run_needs_room_for_its_rows(self) -> None:
        """Three beams that resume with a token each, where the step has room for two, wait for the next step."""
        with simulator(budget=13) as sim:
            add(sim, "b", begin=8, max_tokens=9, min_tokens=9, num_beams=3)
            group = group_of(sim, "b")
            while not (group.started and group.common_prefix() >= 8):
                sim.step()
            preempt(sim, "b")
            sim.pool.forget(memory_of(sim, "b").hashes)
            add(sim, "a", max_tokens=9, min_tokens=9, priority=-1)
            sim.step()
            assert (sim.encoded, sim.plan and sim.plan.num_tokens) == ([10], 1)
            sim.drain()
            sim.compare()
            assert sim.runs == (2, 1)

    def test_admission_waits_for_pages_of_both(self) -> None:
        """Six pages for a: its input's three and three of its own; b needs four and gets none before."""
        with simulator(num_pages=8) as sim:
            add(sim, "a", max_tokens=12, min_tokens=12)
            for _ in range(5):
                sim.step()
            add(sim, "b", words(12, 7), max_tokens=2)
            sim.step()
            assert memory_of(sim, "b").pages == []
            assert sim.pool.num_held == 5
            sim.drain()
            sim.compare()
            assert sim.scheduler.stats.num_preemptions == 0

    @pytest.mark.parametrize("caching", [False, True])
    def test_two_that_fit_only_alone_both_end(self, caching: bool) -> None:
        with simulator(num_pages=9, budget=16, caching=caching) as sim:
            for number in range(2):
                add(sim, f"r{number}", words(14, number), max_tokens=18, min_tokens=18)
            steps = sim.steps()
            assert len(steps) < 40
            assert sim.scheduler.stats.num_encoder_runs <= 3


class TestTime:
    LIMIT = StepLimit(Costs(pair=0.01, score=0.5), tokens=40, work=30.0, least=5.0)

    def test_an_input_that_takes_too_long_runs_as_the_first_prompt(self) -> None:
        """It cannot be cut: 60 tokens, each of which sees 60, are 96 tokens' work."""
        assert self.LIMIT.costs.encoding(60) == 60 * 1.6
        with simulator(num_pages=99, budget=80) as sim:
            sim.limit = self.LIMIT
            for number in range(2):
                add(sim, f"long{number}", words(60, number), max_tokens=4, min_tokens=4)
            add(sim, "short", words(3), max_tokens=4, min_tokens=4)
            assert sim.steps() == [(60, 1), (60, 2), (3, 3), (0, 3), (0, 2), (0, 1)]

    def test_inputs_that_fit_share_a_step(self) -> None:
        with simulator(budget=80) as sim:
            sim.limit = self.LIMIT
            for number in range(5):
                add(sim, f"r{number}", words(8, number), max_tokens=1)
            # Each takes 8.64 for the input, and 1.5 + 0.09 for its first token.
            assert sim.steps() == [(16, 2), (16, 2), (8, 1)]

    def test_what_a_step_has_left_is_what_it_does_not_hold(self) -> None:
        """The scheduler's count of work and the one that is learned from agree."""
        with simulator(num_pages=99, budget=80) as sim:
            sim.limit = StepLimit(Costs(pair=0.01, score=0.5), work=1000.0, least=1.0)
            taken: list[float] = []
            plan_prompts = sim.scheduler._plan_prompts

            def remember(step: NextStep, chunked: list[SequenceGroup]) -> None:
                plan_prompts(step, chunked)
                taken.append(step.limit.work - step.left)

            sim.scheduler._plan_prompts = remember  # type: ignore[method-assign]
            for number in range(4):
                add(sim, f"r{number}", words(20, number), 3 * number + 1, max_tokens=3, min_tokens=3)
            while sim.scheduler.has_unfinished():
                sim.step()
                assert sim.plan is not None
                work = StepWork.of(sim.plan)
                assert taken == ([pytest.approx(work.total(sim.limit.costs))] if work.prompt_tokens else [])
                taken.clear()
            assert sim.runs == (4, 0)

    def test_encoder_runs_are_learned_from(self) -> None:
        with simulator() as sim:
            add(sim, "r", words(10), max_tokens=3)
            sim.step()
            assert sim.plan is not None
            # Ten tokens see ten each, and one decoder token sees itself and these.
            assert StepWork.of(sim.plan) == StepWork(tokens=11, prompt_tokens=10, pairs=111, scores=1)


def test_a_deadline_ends_a_request_that_waits_for_its_turn() -> None:
    with simulator(budget=10) as sim:
        for number in range(3):
            add(sim, f"r{number}", words(10, number), max_tokens=3, deadline=1.0)
        sim.step()
        sim.now = 2.0
        deltas: list[RequestDelta] = sim.step()
        assert {delta.request_id for delta in deltas} == {"r0", "r1", "r2"}
        assert sim.runs == (1, 0)
        assert sim.pool.num_held == 0


def test_one_answer_of_several_leaves_the_pages_to_the_others() -> None:
    with simulator() as sim:
        add(sim, "r", max_tokens=6, min_tokens=6, n=3, temperature=1.0)
        sim.step()
        assert sim.abort("r", 1)
        assert len(memory_of(sim, "r").pages) == 3
        sim.drain()
        sim.compare()
