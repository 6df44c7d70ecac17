"""The scheduler's decisions one by one: which requests run, which are preempted, what is refused, what a step costs."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from paged_simulator import VOCAB, Simulator, make_request, solve
from paged_simulator import small as simulator
from support.reference import skip_if_older
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from engine import MAX_PRIORITY
from engine.errors import InvalidRequestError
from engine.interface.outputs import RequestDelta
from engine.interface.request import Decoding
from engine.interface.sampling_table import EDIT, TABLE, Kind
from engine.scheduling.batch import LastStep, banned_tokens, build_plan, forced_tokens
from engine.scheduling.philox import uniforms
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.row import Row
from engine.scheduling.sequence import IntBuffer, Sequence, SequenceGroup, worst_case_pages
from engine.scheduling.step import NextStep

GREEDY: dict[str, Any] = {"temperature": 0.0}


def prompt(length: int, start: int = 2) -> list[int]:
    return [2 + (start + 5 * i) % (VOCAB - 2) for i in range(length)]


def running(sim: Simulator) -> set[str]:
    """Requests that hold pages."""
    return {g.request.request_id for g in sim.scheduler.groups() if any(len(s.table) for s in g.sequences)}


def group_of(sim: Simulator, request_id: str) -> SequenceGroup:
    return next(group for group in sim.scheduler.groups() if group.request.request_id == request_id)


# ------------------------------------------------------------------ refused at the door


class TestRefusals:
    def test_more_sequences_than_rows(self) -> None:
        with simulator(max_num_seqs=4) as sim:
            for how, name in (({"num_beams": 5}, "num_beams"), ({"n": 5}, "n")):
                with pytest.raises(InvalidRequestError) as caught:
                    sim.add(make_request("r", prompt(3), **how))
                assert caught.value.param == name
                assert all(part in str(caught.value) for part in (name, "5", "4", "--max-num-seqs"))
            assert not sim.scheduler.has_unfinished()

    def test_more_pages_than_there_are(self) -> None:
        with simulator(num_pages=5, block_size=4) as sim:
            sim.add(make_request("fits", prompt(11), max_tokens=10))
            with pytest.raises(InvalidRequestError) as caught:
                sim.add(make_request("r", prompt(11), max_tokens=11))
            assert caught.value.param == "max_tokens"
            parts = ("6 pages", "4 tokens", "11 prompt", "max_tokens 11", "has 5", "--kv-cache-memory")
            assert all(part in str(caught.value) for part in parts), str(caught.value)
            sim.drain()
            sim.compare()

    def test_an_id_in_use(self) -> None:
        with simulator() as sim:
            sim.add(make_request("r", prompt(3)))
            with pytest.raises(InvalidRequestError, match="'r' is in use") as caught:
                sim.scheduler.add(make_request("r", prompt(3)))
            assert caught.value.param == "request_id"
            sim.drain()
            sim.scheduler.add(make_request("r", prompt(3)))

    @pytest.mark.parametrize("size", [1, 2, 3, 16])
    @pytest.mark.parametrize("width", [1, 2, 5])
    @pytest.mark.parametrize(("length", "max_tokens"), [(1, 1), (7, 1), (8, 3), (9, 30), (16, 17)])
    def test_the_worst_case_counts_shared_pages_once(self, size: int, width: int, length: int, max_tokens: int) -> None:
        pages = 0
        for first in range(0, length + max_tokens - 1, size):
            pages += 1 if first + size <= length else width
        assert worst_case_pages(length, max_tokens, width, size) == pages


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("kind", ["n", "num_beams"])
@pytest.mark.parametrize("length", [3, 4, 5])
def test_a_pool_of_exactly_the_worst_case_is_enough(kind: str, width: int, length: int) -> None:
    """Also to come back after a preemption at the widest moment: a group that was admitted once must never
    wait for more pages than there are."""
    max_tokens, came_back = 6, 0
    pages = worst_case_pages(length, max_tokens, width, 2)
    for interruption in range(1, 14):
        with simulator(num_pages=pages, block_size=2, caching=False) as sim:
            sim.add(make_request("r", prompt(length), max_tokens=max_tokens, temperature=1.5, seed=3, **{kind: width}))
            for _ in range(interruption):
                sim.step()
            if sim.scheduler.has_unfinished():
                everything = make_request("urgent", prompt(2 * pages), max_tokens=1, priority=-1)
                sim.add(everything)
            sim.drain()
            sim.compare()
            came_back += sim.scheduler.stats.num_preemptions
    assert came_back > 3


# ------------------------------------------------------------------ order and preemption


class TestOrder:
    def test_arrival_order_then_priority(self) -> None:
        with simulator(max_num_seqs=1, budget=8) as sim:
            for name, priority in (("a", 0), ("b", 0), ("late", 1), ("c", 0), ("urgent", -1)):
                sim.add(make_request(name, prompt(3), max_tokens=1, priority=priority))
            order = [delta.request_id for _ in range(5) for delta in sim.step()]
            assert order == ["urgent", "a", "b", "c", "late"]

    def test_an_arrival_joins_the_next_step(self) -> None:
        with simulator() as sim:
            sim.add(make_request("a", prompt(3), max_tokens=9))
            sim.step()
            sim.add(make_request("b", prompt(5), max_tokens=9))
            assert {delta.request_id for delta in sim.step()} == {"a", "b"}

    def test_the_youngest_is_preempted(self) -> None:
        with simulator(num_pages=6, block_size=2, caching=False) as sim:
            for name in ("a", "b", "c"):
                sim.add(make_request(name, prompt(3), max_tokens=6))
            sim.step()
            assert running(sim) == {"a", "b", "c"}
            while sim.scheduler.stats.num_preemptions == 0:
                sim.step()
            assert running(sim) == {"a", "b"}
            sim.drain()
            sim.compare()

    def test_the_least_urgent_is_preempted_for_an_urgent_arrival(self) -> None:
        with simulator(max_num_seqs=2) as sim:
            sim.add(make_request("old", prompt(3), max_tokens=20))
            sim.add(make_request("low", prompt(4), max_tokens=20, priority=5))
            sim.step()
            sim.add(make_request("urgent", prompt(5), max_tokens=20, priority=-5))
            sim.step()
            assert running(sim) == {"old", "urgent"}
            sim.drain()
            sim.compare()

    def test_equal_priority_does_not_push_anybody_out(self) -> None:
        with simulator(max_num_seqs=1) as sim:
            sim.add(make_request("old", prompt(3), max_tokens=5))
            sim.step()
            sim.add(make_request("new", prompt(3), max_tokens=5))
            sim.step()
            assert running(sim) == {"old"}
            assert sim.scheduler.stats.num_preemptions == 0

    def test_tenants_in_turn_each_ones_requests_by_priority(self) -> None:
        with simulator(max_num_seqs=1, budget=8) as sim:
            for name, priority in (("a0", 0), ("a1", 0), ("a2", 5), ("a3", -9)):
                sim.add(make_request(name, prompt(3), max_tokens=1, tenant="a", priority=priority))
            for name, tenant in (("b0", "b"), ("n0", None), ("b1", "b")):
                sim.add(make_request(name, prompt(3), max_tokens=1, tenant=tenant))
            order = [delta.request_id for _ in range(7) for delta in sim.step()]
        assert order == ["a3", "b0", "n0", "a0", "b1", "a1", "a2"]

    def test_a_tenant_with_one_request_waits_for_one_of_each_other(self) -> None:
        with simulator(max_num_seqs=1, budget=8) as sim:
            for number in range(30):
                sim.add(make_request(f"a{number}", prompt(3), max_tokens=1, tenant="a"))
            sim.step()
            sim.add(make_request("b", prompt(3), max_tokens=1, tenant="b"))
            order = [delta.request_id for _ in range(2) for delta in sim.step()]
        assert "b" in order

    def test_a_tenants_priority_takes_nothing_from_what_runs(self) -> None:
        """It would starve others. Nor does it decide which request is preempted when pages are short."""
        with simulator(num_pages=6, block_size=2, max_num_seqs=2, caching=False) as sim:
            sim.add(make_request("old", prompt(3), max_tokens=6, tenant="a", priority=5))
            sim.add(make_request("new", prompt(3), max_tokens=6, tenant="b", priority=-5))
            sim.add(make_request("urgent", prompt(3), max_tokens=6, tenant="b", priority=-9))
            sim.step()
            assert running(sim) == {"old", "urgent"}
            while sim.scheduler.stats.num_preemptions == 0:
                sim.step()
            assert running(sim) == {"old"}
            sim.drain()
            sim.compare()

    def test_whether_rows_or_pages_are_missing_is_told(self) -> None:
        with simulator(max_num_seqs=2, budget=8) as sim:
            sim.add(make_request("long", prompt(20), max_tokens=9))
            sim.step()
            sim.add(make_request("next", prompt(12, start=3), max_tokens=9))
            sim.step()
            snapshot = sim.scheduler.snapshot()
            assert (snapshot.num_waiting, snapshot.lacks_room) == (1, False), (
                "the step was full, which is another matter"
            )
            sim.step()
            sim.add(make_request("last", prompt(3), max_tokens=1))
            sim.step()
            assert sim.scheduler.snapshot().lacks_room
            sim.abort("last")
            assert not sim.scheduler.snapshot().lacks_room
            sim.drain()

    def test_a_group_is_preempted_whole(self) -> None:
        with simulator(num_pages=12, block_size=2, caching=False) as sim:
            sim.add(make_request("beams", prompt(4), max_tokens=6, num_beams=3, priority=1))
            for _ in range(3):
                sim.step()
            sim.add(make_request("urgent", prompt(23), max_tokens=1))
            sim.step()
            group = group_of(sim, "beams")
            assert [len(sequence.table) for sequence in group.sequences] == [0, 0, 0]
            sim.drain()
            sim.compare()

    def test_the_first_in_line_goes_on_although_a_victim_had_copies_pending(self) -> None:
        """Beams that were planned earlier in the same step give their pages back at once, those they were
        going to copy from included: otherwise the urgent request itself would be preempted."""
        met = 0
        for pages in range(13, 18):
            for steps in range(1, 7):
                with simulator(num_pages=pages, block_size=3, max_num_seqs=5, budget=5, caching=False) as sim:
                    sim.add(make_request("beams", prompt(4), max_tokens=9, num_beams=4))
                    for _ in range(steps):
                        sim.step()
                    sim.add(make_request("urgent", prompt(3 * pages - 3), max_tokens=3, priority=-1))
                    sim.drain()  # checks every step that the first in line runs
                    sim.compare()
                    met += sim.scheduler.stats.num_preemptions > 0
        assert met > 10

    def test_preemption_at_every_step_changes_nothing(self) -> None:
        """Greedy, sampled and beams, interrupted once at each step of their lives."""
        kinds: list[dict[str, Any]] = [{}, {"n": 3, "temperature": 1.0, "seed": 4}, {"num_beams": 3, "n": 2}]
        for how in kinds:
            for caching in (False, True):
                for at in range(1, 12):
                    with simulator(num_pages=24, block_size=2, budget=8, caching=caching) as sim:
                        sim.add(make_request("r", prompt(9), max_tokens=8, logprobs=1, **how))
                        for _ in range(at):
                            sim.step()
                        if not sim.scheduler.has_unfinished():
                            break
                        sim.add(make_request("urgent", prompt(48, 7), max_tokens=1, priority=-1))
                        sim.drain()
                        sim.compare()
                        assert sim.scheduler.stats.num_preemptions == 1
                else:
                    pytest.fail("the request never finished by itself")


# ------------------------------------------------------------------ chunks, prefixes, copies


class TestShortPrompts:
    def test_a_short_prompt_does_not_wait_for_a_long_one(self) -> None:
        with simulator(budget=8, num_pages=80) as sim:
            sim.add(make_request("long", prompt(120), max_tokens=1))
            sim.step()
            sim.add(make_request("short", prompt(11, start=3), max_tokens=1))
            steps = [[delta.request_id for delta in sim.step()] for _ in range(3)]
            assert steps[-1] == ["short"]  # four tokens a step
            assert sim.scheduler._groups["long"].sequences[0].num_computed == 8 + 4 + 4 + 5

    def test_a_turn_is_as_short_as_what_is_not_cached(self) -> None:
        with simulator(budget=8, num_pages=80) as sim:
            sim.add(make_request("first turn", prompt(40), max_tokens=1))
            sim.drain()
            sim.add(make_request("long", prompt(60, start=3), max_tokens=1))
            sim.step()
            sim.add(make_request("second turn", [*prompt(40), 2, 3], max_tokens=1))
            assert [delta.request_id for _ in range(2) for delta in sim.step()] == ["second turn"]

    def test_prompts_of_the_same_length_come_in_turn(self) -> None:
        with simulator(budget=8, num_pages=80) as sim:
            for number in range(3):
                sim.add(make_request(str(number), prompt(40, start=2 + number), max_tokens=1))
            assert [delta.request_id for _ in range(15) for delta in sim.step()] == ["0", "1", "2"]

    def test_priorities_come_first(self) -> None:
        with simulator(budget=8, num_pages=80) as sim:
            sim.add(make_request("long", prompt(48), max_tokens=1))
            sim.step()
            sim.add(make_request("later", prompt(4, start=3), max_tokens=1, priority=1))
            assert [delta.request_id for _ in range(6) for delta in sim.step()] == ["long", "later"]

    def test_short_prompts_leave_half_to_a_long_one(self) -> None:
        with simulator(budget=8, num_pages=80, caching=False) as sim:
            sim.add(make_request("long", prompt(120), max_tokens=1))
            sim.step()
            for number in range(12):
                sim.add(make_request(str(number), prompt(20, start=number), max_tokens=1))
                before = sim.scheduler._groups["long"].sequences[0].num_computed
                sim.step()
                assert sim.scheduler._groups["long"].sequences[0].num_computed == before + 4


class TestBackground:
    """Requests with the highest priority number: lines of batches."""

    def test_it_stands_still_while_a_client_waits_for_its_first_token(self) -> None:
        with simulator(budget=8, num_pages=80) as sim:
            sim.add(make_request("line", prompt(3), max_tokens=30, priority=MAX_PRIORITY, tenant="a"))
            sim.step()
            sim.add(make_request("client", prompt(20, start=3), max_tokens=4, tenant="b"))
            assert [[delta.request_id for delta in sim.step()] for _ in range(4)] == [
                [],
                [],
                ["client"],
                ["client", "line"],
            ]
            sim.drain()
            sim.compare()

    def test_clients_of_all_keys_come_first_and_take_its_place(self) -> None:
        with simulator(max_num_seqs=1, budget=64) as sim:
            for number in range(2):
                sim.add(make_request(f"line {number}", prompt(5), max_tokens=9, priority=MAX_PRIORITY, tenant="a"))
            sim.step()
            assert not sim.scheduler.snapshot().lacks_room, "a client would not wait"
            for number, tenant in enumerate("bca"):
                sim.add(make_request(f"client {number}", prompt(5, number), max_tokens=1, tenant=tenant))
            order = [delta.request_id for _ in range(3) for delta in sim.step()]
            assert order == ["client 0", "client 1", "client 2"]
            sim.drain()
            sim.compare()

    def test_its_prompts_take_short_steps_while_clients_come(self) -> None:
        """So that the next client waits only for the end of a short step."""
        with simulator(budget=64, num_pages=80) as sim:
            sim.add(make_request("alone", prompt(100), max_tokens=1, priority=MAX_PRIORITY))
            computed = [0]

            def step() -> int:
                sim.step()
                computed.append(sim.scheduler.stats.computed_tokens)
                return computed[-1] - computed[-2]

            assert step() == 64
            sim.add(make_request("client", prompt(5, start=3), max_tokens=2))
            assert [step() for _ in range(3)] == [5, 1 + 3, 4]
            sim.drain()
            sim.compare()

    def test_a_short_step_is_no_larger_than_a_whole_one(self) -> None:
        step = NextStep(0)  # decoding rows have taken all tokens
        step.begin_prompts()
        step.shorten(1)
        assert not step.is_open

    def test_a_short_step_has_a_token_for_each_row_of_the_first_request(self) -> None:
        step = NextStep(17)
        step.begin_prompts()
        step.shorten(2)
        assert step.budget == 2


class TestProgress:
    def test_a_long_prompt_comes_in_chunks_beside_decoding(self) -> None:
        with simulator(budget=10, max_num_seqs=4) as sim:
            sim.add(make_request("short", prompt(2), max_tokens=12))
            sim.step()
            sim.add(make_request("long", prompt(40, 7), max_tokens=2))
            news = [{delta.request_id for delta in sim.step()} for _ in range(5)]
            assert news == [{"short"}] * 4 + [{"short", "long"}]  # 9 tokens a step beside the short one's
            assert sim.events["chunked"] == 4
            sim.drain()
            sim.compare()

    def test_a_common_prefix_is_computed_once(self) -> None:
        with simulator() as sim:
            sim.add(make_request("a", prompt(19), max_tokens=2))
            sim.drain()
            computed = sim.scheduler.stats.computed_tokens
            assert computed == 20
            sim.add(make_request("b", [*prompt(17), 2, 3], max_tokens=2))
            sim.drain()
            sim.compare()
            assert sim.cached_tokens == {"b": 16}
            assert sim.scheduler.stats.computed_tokens == computed + 3 + 1

    def test_the_last_token_is_always_computed(self) -> None:
        with simulator() as sim:
            for name in ("a", "b"):
                sim.add(make_request(name, prompt(16), max_tokens=1))
                sim.drain()
            assert sim.cached_tokens == {"b": 12}

    def test_generated_tokens_are_found_again(self) -> None:
        """The second turn of a chat: prompt, answer, and more."""
        with simulator() as sim:
            request = make_request("a", prompt(7), max_tokens=10)
            sim.add(request)
            sim.drain()
            sim.add(make_request("b", [*prompt(7), *sim.answers["a"][0].tokens, 3, 3], max_tokens=1))
            sim.drain()
            assert sim.cached_tokens == {"b": 16}

    def test_a_request_finds_what_a_running_one_has_computed(self) -> None:
        with simulator() as sim:
            sim.add(make_request("a", prompt(9), max_tokens=20))
            sim.step()
            sim.add(make_request("b", prompt(9), max_tokens=20))
            sim.step()
            assert sim.cached_tokens == {"b": 8}
            first, second = group_of(sim, "a").sequences[0], group_of(sim, "b").sequences[0]
            assert list(first.table)[:2] == list(second.table)[:2]

    def test_salts_do_not_meet(self) -> None:
        with simulator() as sim:
            for name, salt in (("a", None), ("b", "x"), ("c", "y"), ("d", "x"), ("e", "")):
                sim.add(make_request(name, prompt(9), max_tokens=1, cache_salt=salt))
                sim.drain()
            assert sim.cached_tokens == {"d": 8}

    def test_prompt_logprobs_take_no_hits_and_give_some(self) -> None:
        with simulator() as sim:
            for name in ("a", "b"):
                sim.add(make_request(name, prompt(9), max_tokens=1, prompt_logprobs=2))
                sim.drain()
            sim.add(make_request("c", prompt(9), max_tokens=1))
            sim.drain()
            sim.compare()
            assert sim.cached_tokens == {"c": 8}

    def test_a_failed_step_publishes_nothing(self) -> None:
        with simulator() as sim:
            sim.add(make_request("a", prompt(9), max_tokens=1))
            (delta,) = sim.fail()
            assert delta.error == "it broke"
            assert delta.finished
            assert [choice.finish_reason for choice in delta.choices] == ["error"]
            sim.add(make_request("b", prompt(9), max_tokens=1))
            sim.drain()
            sim.compare()
            assert sim.cached_tokens == {}

    def test_a_failed_step_ends_only_those_that_ran_in_it(self) -> None:
        with simulator(max_num_seqs=1) as sim:
            sim.add(make_request("a", prompt(9)))
            sim.add(make_request("b", prompt(9)))
            assert [delta.request_id for delta in sim.fail()] == ["a"]
            sim.drain()
            sim.compare()
            assert sim.answers["b"][0].finish_reason == "length"

    def test_beams_copy_at_most_one_page_each_and_step(self) -> None:
        with simulator(num_pages=200, block_size=4) as sim:
            sim.add(make_request("r", prompt(10), max_tokens=30, num_beams=6))
            before, most = 0, 0
            while sim.scheduler.has_unfinished():
                sim.step()
                copies = sim.scheduler.stats.num_page_copies
                most, before = max(most, copies - before), copies
            assert 0 < most <= 6
            sim.compare()

    def test_beams_share_a_long_prompt(self) -> None:
        with simulator(num_pages=1000, block_size=4, max_num_seqs=16, budget=512) as sim:
            sim.add(make_request("r", prompt(1000), max_tokens=10, num_beams=16, n=16))
            sim.drain()
            assert sim.scheduler.snapshot().peak_pages_held < 1.5 * 250

    def test_the_last_holder_of_a_page_writes_in_place(self) -> None:
        """n answers from one prompt: n - 1 copies of its unfinished page, and none ever after."""
        with simulator() as sim:
            sim.add(make_request("r", prompt(6), max_tokens=9, n=4, temperature=1.0))
            sim.drain()
            sim.compare()
            assert sim.scheduler.stats.num_page_copies == 3

    def test_the_common_prefix_of_beams_is_computed_once_after_a_preemption(self) -> None:
        with simulator(num_pages=30, block_size=4, caching=False) as sim:
            sim.add(make_request("r", prompt(30), max_tokens=8, num_beams=4))
            for _ in range(4):
                sim.step()
            beams = group_of(sim, "r").sequences
            computed = sim.scheduler.stats.computed_tokens
            common = group_of(sim, "r").common_prefix()
            rest = sum(beam.num_tokens - common for beam in beams)
            sim.add(make_request("urgent", prompt(110, 5), max_tokens=1, priority=-1))
            while group_of(sim, "r").sequences[0].num_output < 5:
                sim.step()
            assert sim.scheduler.stats.num_preemptions == 1
            assert sim.scheduler.stats.computed_tokens == computed + 110 + common + rest


# ------------------------------------------------------------------ ends


class TestEnds:
    def test_abort_frees_at_once_and_says_nothing(self) -> None:
        with simulator(caching=False) as sim:
            sim.add(make_request("r", prompt(9), max_tokens=9, num_beams=3))
            sim.step()
            sim.step()
            assert sim.abort("r")
            assert sim.pool.num_free == sim.pool.total
            assert not sim.scheduler.has_unfinished()
            assert sim.step() == []
            assert sim.scheduler.stats.num_aborted == 1

    def test_unknown_requests_are_not_aborted(self) -> None:
        with simulator() as sim:
            assert not sim.scheduler.abort("r")

    def test_one_answer_of_several(self) -> None:
        with simulator() as sim:
            sim.add(make_request("r", prompt(9), max_tokens=9, n=3, temperature=1.0))
            sim.step()
            assert sim.abort("r", 1)
            assert not sim.abort("r", 1)
            assert {choice.index for delta in sim.step() for choice in delta.choices} == {0, 2}
            sim.drain()
            sim.compare()

    def test_the_last_answer_ends_the_request(self) -> None:
        with simulator() as sim:
            sim.add(make_request("r", prompt(9), max_tokens=9, n=2, temperature=1.0))
            sim.step()
            assert sim.abort("r", 0)
            assert sim.scheduler.has_unfinished()
            assert sim.abort("r", 1)
            assert not sim.scheduler.has_unfinished()

    def test_a_single_answer_is_the_request(self) -> None:
        with simulator() as sim:
            sim.add(make_request("r", prompt(9), max_tokens=9))
            assert sim.abort("r", 0)
            assert not sim.scheduler.has_unfinished()

    def test_one_beam_cannot_be_aborted(self) -> None:
        with simulator() as sim:
            sim.add(make_request("r", prompt(9), max_tokens=5, num_beams=3, n=3))
            sim.step()
            assert not sim.abort("r", 1)
            sim.drain()
            sim.compare()

    @pytest.mark.parametrize("started", [False, True])
    @pytest.mark.parametrize("how", [{}, {"n": 3, "temperature": 1.0}, {"num_beams": 3, "n": 2}], ids=str)
    def test_a_deadline_ends_all_answers(self, how: dict[str, Any], started: bool) -> None:
        with simulator() as sim:
            sim.add(make_request("r", prompt(9), max_tokens=30, deadline=5.0, **how))
            if started:
                sim.step()
            sim.now = 5.0
            (delta,) = sim.step()
            assert delta.finished
            assert delta.error is None
            assert [choice.index for choice in delta.choices] == list(range(how.get("n", 1)))
            assert {(c.finish_reason, c.stop_reason) for c in delta.choices} == {("abort", "deadline")}
            assert not sim.scheduler.has_unfinished()
            sim.drain()

    def test_a_deadline_leaves_the_others_alone(self) -> None:
        with simulator() as sim:
            sim.add(make_request("a", prompt(9), max_tokens=6, deadline=1.0))
            sim.add(make_request("b", prompt(9), max_tokens=6, deadline=100.0))
            sim.step()
            sim.now = 2.0
            news = {delta.request_id: delta.finished for delta in sim.step()}
            assert news == {"a": True, "b": False}
            sim.drain()
            sim.compare()

    def test_a_deadline_outlives_neither_its_request_nor_its_memory(self) -> None:
        with simulator() as sim:
            sim.add(make_request("early", prompt(3), max_tokens=90, deadline=500.0))
            sim.add(make_request("r", prompt(9), max_tokens=2, deadline=1000.0))
            group = weakref.ref(group_of(sim, "r"))
            for _ in range(3):
                sim.step()
            gc.collect()
            assert group() is None, "a finished request stays in memory until its deadline"
            sim.scheduler.add(make_request("r", prompt(9), max_tokens=50, deadline=2000.0))
            sim.now = 1500.0
            early, again = sim_deltas(sim)
            assert (early.request_id, early.finished) == ("early", True)
            assert (again.request_id, again.finished) == ("r", False)

    @pytest.mark.parametrize("how", [{}, {"n": 2, "temperature": 1.0}, {"num_beams": 2}], ids=str)
    def test_nan_ends_its_request_alone(self, how: dict[str, Any]) -> None:
        with simulator() as sim:
            sim.add(make_request("good", prompt(5), max_tokens=4))
            sim.add(make_request("bad", prompt(7), max_tokens=4, **how))
            plan = sim.scheduler.schedule()
            assert plan is not None
            result = sim.execute(plan)
            result.logprobs[1] = np.nan
            result.scores[1] = np.nan
            good, bad = sim.scheduler.update(result)
            assert (good.request_id, good.finished, good.error) == ("good", False, None)
            assert bad.finished
            assert "NaN" in (bad.error or "")
            assert {choice.finish_reason for choice in bad.choices} == {"error"}
            sim.scheduler.check_integrity()
            assert [group.request.request_id for group in sim.scheduler.groups()] == ["good"]

    def test_steps_come_in_pairs(self) -> None:
        with simulator() as sim:
            sim.add(make_request("r", prompt(3)))
            plan = sim.scheduler.schedule()
            assert plan is not None
            with pytest.raises(AssertionError, match="twice"):
                sim.scheduler.schedule()
            result = sim.execute(plan)
            sim.scheduler.update(result)
            with pytest.raises(AssertionError, match="without"):
                sim.scheduler.update(result)

    def test_nothing_to_do(self) -> None:
        with simulator() as sim:
            assert sim.scheduler.schedule() is None
            assert not sim.scheduler.has_unfinished()

    def test_statistics(self) -> None:
        with simulator(max_num_seqs=2) as sim:
            for name in ("a", "b", "c"):
                sim.add(make_request(name, prompt(5), max_tokens=3))
            sim.step()
            stats = sim.scheduler.snapshot()
            assert (stats.num_running, stats.num_waiting) == (2, 1)
            assert stats.pages_free + stats.pages_held + stats.pages_cached == stats.pages_total == 50
            sim.drain()
            stats = sim.scheduler.snapshot()
            assert (stats.num_finished, stats.prompt_tokens, stats.generation_tokens) == (3, 15, 9)
            assert stats.num_steps == 6


def test_streamed_beams_are_what_they_become() -> None:
    """What a step settles is the beginning of the final answers; some of it comes before the end."""
    early = 0
    for seed in range(12):
        with simulator(num_pages=100) as sim:
            request = make_request(
                "r", prompt(5, seed), max_tokens=14, num_beams=3, n=3, stop_ids=frozenset({0}), logprobs=1
            )
            expected = solve(sim.model, request)
            sim.add(request)
            while sim.scheduler.has_unfinished():
                sim.step()
                for answer, final in zip(sim.answers["r"], expected, strict=True):
                    assert answer.tokens == final.tokens[: len(answer.tokens)]
                    early += bool(answer.tokens) and answer.finish_reason is None
            sim.compare()
    assert early > 20


# ------------------------------------------------------------------ the cost of a step


def count_calls(work: Callable[[], object]) -> int:
    """Function calls, Python's and C's."""
    calls = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()  # a collection may run other people's callbacks
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


class TestCost:
    """Counted in calls, which do not depend on the machine."""

    def calls_per_step(self, waiting: int, aborted: int = 0, **decoding: Any) -> list[int]:
        with simulator(num_pages=40, block_size=4, max_num_seqs=8, budget=64) as sim:
            for number in range(8):
                sim.scheduler.add(make_request(f"running{number}", prompt(5, number), max_tokens=12, deadline=1e9))
            sim_step(sim)
            for number in range(waiting):
                sim.scheduler.add(make_request(f"waiting{number}", prompt(6, number), max_tokens=2, **decoding))
            for number in range(aborted):
                sim.scheduler.add(make_request(f"gone{number}", prompt(6, number), max_tokens=2))
                sim.scheduler.abort(f"gone{number}")
            return [count_calls(lambda: sim_step(sim)) for _ in range(10)]

    @pytest.mark.parametrize("decoding", [{}, {"deadline": 1e9}, {"priority": 3}, {"num_beams": 4}], ids=str)
    def test_ten_thousand_waiting_requests_cost_nothing(self, decoding: dict[str, Any]) -> None:
        few, many = self.calls_per_step(10, **decoding), self.calls_per_step(10_000, **decoding)
        assert many == few
        assert max(few) < 3000

    def test_admission_costs_what_is_admitted(self) -> None:
        """Requests leave and others come in, with 10 or 10,000 behind them."""
        costs = {}
        for waiting in (10, 10_000):
            with simulator(num_pages=40, block_size=4, max_num_seqs=8, budget=64) as sim:
                for number in range(waiting):
                    sim.scheduler.add(make_request(f"r{number}", prompt(6, number), max_tokens=2))
                costs[waiting] = [count_calls(lambda: sim_step(sim)) for _ in range(2)]
        assert costs[10_000] == costs[10]

    def test_aborted_requests_in_the_queue_cost_nothing_either(self) -> None:
        assert self.calls_per_step(10, aborted=5000) == self.calls_per_step(10)

    def test_the_cost_grows_with_the_rows_that_run(self) -> None:
        """The measure itself works."""
        costs = []
        for rows in (2, 8):
            with simulator() as sim:
                for number in range(rows):
                    sim.scheduler.add(make_request(f"r{number}", prompt(5, number), max_tokens=9))
                sim_step(sim)
                costs.append(count_calls(lambda: sim_step(sim)))
        assert costs[1] > 1.5 * costs[0]


def sim_deltas(sim: Simulator) -> list[RequestDelta]:
    """A step whose news are not kept: for ids that are used twice."""
    plan = sim.scheduler.schedule()
    assert plan is not None
    return sim.scheduler.update(sim.execute(plan))


def sim_step(sim: Simulator) -> StepPlan:
    """schedule and update alone, without the simulator's checks; every row continues with token 3."""
    plan = sim.scheduler.schedule()
    assert plan is not None
    rows = 0 if plan.sampling is None else len(plan.sampling.rows)
    scores = np.full((rows, 1), -1.0, dtype=np.float32)
    result = StepResult(
        tokens=np.full((rows, 1), 3, dtype=np.int32),
        scores=scores,
        logprobs=scores,
        ranks=np.ones((rows, 1), dtype=np.int32),
        top_ids=np.zeros((rows, 0), dtype=np.int32),
        top_logprobs=np.zeros((rows, 0), dtype=np.float32),
    )
    sim.scheduler.update(result)
    return plan


# ------------------------------------------------------------------ the layout of a plan


def row_of(length: int, output: list[int] | None = None, start: int = 0, **decoding: Any) -> Row:
    """A row whose sequence has a prompt and an output, ready to be sampled."""
    group = SequenceGroup(make_request("r", prompt(length), **decoding), 0, b"")
    sequence = group.sequences[0]
    for token in output or ():
        sequence.tokens.append(token)
    group.started = bool(output)
    sequence.num_computed = start
    sequence.table.extend(range(1, 2 + sequence.num_tokens // 4))
    return Row(group, sequence, start, sequence.num_tokens - start, True)


class TestPlan:
    def test_types_are_flat_and_small(self) -> None:
        plan = build_plan([row_of(5), row_of(3, logit_bias=((4, 1.5),), top_k=3)], [(1, 2)], 4)
        for name in ("token_ids", "positions", "slots", "query_start", "context_lens", "block_tables", "copies"):
            assert getattr(plan, name).dtype == np.int32, name
        batch = plan.sampling
        assert batch is not None
        assert (batch.table.dtype, batch.edits.dtype) == (TABLE, EDIT)
        assert batch.uniforms.dtype == np.float64
        assert batch.rows.dtype == batch.masked.dtype == np.int32
        assert batch.masks.dtype == np.uint32
        arrays = (batch.rows, batch.table, batch.edits, batch.uniforms, batch.masked, batch.masks)
        assert all(array.flags.c_contiguous for array in arrays)

    def test_rows_of_different_lengths(self) -> None:
        first, second = row_of(9, start=8), row_of(6, start=0)
        second.sequence.table = IntBuffer([7, 5])
        plan = build_plan([first, second], [], 4)
        assert plan.query_start.tolist() == [0, 1, 7]
        assert plan.context_lens.tolist() == [9, 6]
        assert plan.positions.tolist() == [8, 0, 1, 2, 3, 4, 5]
        assert plan.slots.tolist() == [12, 28, 29, 30, 31, 20, 21]
        assert plan.block_tables.tolist() == [[1, 2, 3], [7, 5, 0]]
        assert plan.token_ids.tolist() == [prompt(9)[8], *prompt(6)]
        assert plan.copies.shape == (0, 2)
        assert plan.sampling is not None
        assert plan.sampling.rows.tolist() == [0, 6]

    def test_a_version_says_that_rows_are_one_token_further(self) -> None:
        first, second = row_of(3, output=[7], seed=5, temperature=1.0), row_of(4, output=[8], repetition_penalty=1.2)
        last = LastStep()

        def plan(*rows: Row) -> StepPlan:
            ends = [(row, row.sequence.num_tokens - 1) for row in rows]
            return build_plan([Row(row.group, row.sequence, end, 1, True) for row, end in ends], [], 4, (), last)

        before = plan(first, second)
        for row in (first, second):
            row.sequence.tokens.append(9)
        again = plan(first, second)
        assert before.sampling is not None
        assert again.sampling is not None
        assert again.version == before.version == before.sampling.version == again.sampling.version
        assert again.sampling.edits_version != before.sampling.edits_version
        assert again.sampling.table["position"].tolist() == [2, 2]
        assert before.sampling.table["position"].tolist() == [1, 1], "what was handed out stays as it was"
        names = [name for name in TABLE.names or () if name != "position"]
        assert all((again.sampling.table[name] == before.sampling.table[name]).all() for name in names)
        versions = [before.version, plan(first).version, plan(first, second).version]
        last.forget()
        versions += [plan(first, second).version, build_plan([first], [], 4).version]
        assert len(set(versions)) == 5

    def test_uniforms_belong_to_seed_choice_and_position(self) -> None:
        fresh = row_of(4, n=3, temperature=1.0, seed=9)
        going_on = row_of(4, output=[5, 6], temperature=1.0, seed=2**63 + 1)
        going_on.sequence.index = 2
        greedy, beams = row_of(4, temperature=0.0, seed=9), row_of(4, num_beams=2, seed=9)
        batch = build_plan([fresh, going_on, greedy, beams], [], 4).sampling
        assert batch is not None
        assert batch.table["num_draws"].tolist() == [3, 1, 1, 0]
        assert batch.table["beam_width"].tolist() == [0, 0, 0, 4]
        assert batch.uniforms[0].tolist() == uniforms([9] * 3, [0, 1, 2], [0] * 3).tolist()
        assert batch.uniforms[1, 0] == uniforms([2**63 + 1], [2], [2])[0]

    def test_history_is_only_there_for_penalties(self) -> None:
        rows = [row_of(4), row_of(3, output=[9, 9], presence_penalty=0.5), row_of(2, repetition_penalty=1.1)]
        batch = build_plan(rows, [], 4).sampling
        assert batch is not None
        assert batch.edits["kind"].tolist() == [Kind.HISTORY] * 7
        assert batch.edits["row"].tolist() == [1] * 5 + [2] * 2
        assert batch.edits["token"].tolist() == [*prompt(3), 9, 9, *prompt(2)]
        assert batch.edits["value"].tolist() == [0.0] * 3 + [1.0] * 2 + [0.0] * 2

    def test_biases_name_their_rows(self) -> None:
        rows = [row_of(4), row_of(4, logit_bias=((7, 1.5), (8, -2.0))), row_of(4, logit_bias=((7, 3.0),))]
        batch = build_plan(rows, [], 4).sampling
        assert batch is not None
        assert batch.edits.tolist() == [(1, 7, Kind.BIAS, 1.5), (1, 8, Kind.BIAS, -2.0), (2, 7, Kind.BIAS, 3.0)]

    def test_enormous_but_valid_parameters(self) -> None:
        batch = build_plan([row_of(4, top_k=2**31 - 1, temperature=1e38, seed=2**64 - 1)], [], 4).sampling
        assert batch is not None
        assert batch.table["top_k"].tolist() == [2**31 - 1]


# ------------------------------------------------------------------ bans and forced tokens, as transformers has them

EOS = 3


def allowed_by(processor: LogitsProcessor, tokens: list[int]) -> set[int]:
    scores = processor(torch.tensor([tokens]), torch.zeros(1, VOCAB))
    return set(torch.nonzero(scores[0] > -torch.inf).flatten().tolist())


def allowed_here(tokens: list[int], num_prompt: int, decoding: Decoding) -> set[int]:
    request = dataclasses.replace(make_request("r", tokens[:num_prompt]), decoding=decoding)
    group = SequenceGroup(request, 0, b"")
    sequence = Sequence(0, tokens[:num_prompt], with_logprobs=False)
    for token in tokens[num_prompt:]:
        sequence.tokens.append(token)
    row = Row(group, sequence, 0, len(tokens), True)
    return set(forced_tokens(row)) or set(range(VOCAB)) - set(banned_tokens(row).tolist())


HISTORIES = [
    ([5], 1),
    ([5, 6], 1),
    ([5, 6, 5], 2),
    ([5, 6, 7, 5, 6], 3),
    ([4, 4, 4, 4], 1),
    ([5, 6, 7, 8, 5, 6, 7], 4),
    ([5, 6, 5, 7, 5, 8, 5], 3),
    ([9, 8, 7, 6, 5, 4], 5),
]


@pytest.mark.parametrize(("tokens", "num_prompt"), HISTORIES)
class TestBans:
    @pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
    def test_no_repeat_ngram(self, tokens: list[int], num_prompt: int, size: int) -> None:
        decoding = Decoding(max_tokens=20, no_repeat_ngram_size=size)
        assert allowed_here(tokens, num_prompt, decoding) == allowed_by(NoRepeatNGramLogitsProcessor(size), tokens)

    @pytest.mark.parametrize("length", [1, 3, 5])
    def test_min_length(self, tokens: list[int], num_prompt: int, length: int) -> None:
        decoding = Decoding(max_tokens=20, min_length=length, eos_ids=frozenset({EOS}), stop_ids=frozenset({EOS, 9}))
        assert allowed_here(tokens, num_prompt, decoding) == allowed_by(MinLengthLogitsProcessor(length, EOS), tokens)

    @pytest.mark.parametrize("length", [1, 2, 3])
    def test_min_tokens(self, tokens: list[int], num_prompt: int, length: int) -> None:
        decoding = Decoding(max_tokens=20, min_tokens=length, stop_ids=frozenset({EOS, 9}))
        processor = MinNewTokensLengthLogitsProcessor(num_prompt, length, [EOS, 9])
        assert allowed_here(tokens, num_prompt, decoding) == allowed_by(processor, tokens)

    @pytest.mark.parametrize(
        "words", [[[1]], [[5, 6], [4, 8], [8]], [[5, 6, 5], [6, 2], [6, 7, 9], [EOS]], [[9, 5, 6, 7, 8, 5, 6, 7, 5]]]
    )
    def test_bad_words(self, tokens: list[int], num_prompt: int, words: list[list[int]]) -> None:
        skip_if_older(any(len(word) > 1 for word in words))
        decoding = Decoding(max_tokens=20, bad_words=tuple(tuple(word) for word in words if word != [EOS]))
        assert allowed_here(tokens, num_prompt, decoding) == allowed_by(NoBadWordsLogitsProcessor(words, EOS), tokens)

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_repeated_source_ngrams(self, tokens: list[int], num_prompt: int, size: int) -> None:
        """Of a decoder-only model's prompt."""
        decoding = Decoding(max_tokens=20, encoder_no_repeat_ngram_size=size)
        processor = EncoderNoRepeatNGramLogitsProcessor(size, torch.tensor([tokens[:num_prompt]]))
        assert allowed_here(tokens, num_prompt, decoding) == allowed_by(processor, tokens)

    def test_suppressed(self, tokens: list[int], num_prompt: int) -> None:
        decoding = Decoding(max_tokens=20, suppress_tokens=(1, 8))
        assert allowed_here(tokens, num_prompt, decoding) == allowed_by(SuppressTokensLogitsProcessor([1, 8]), tokens)

    def test_suppressed_at_the_beginning(self, tokens: list[int], num_prompt: int) -> None:
        decoding = Decoding(max_tokens=20, begin_suppress_tokens=(1, 8))
        processor = SuppressTokensAtBeginLogitsProcessor([1, 8], num_prompt)
        assert allowed_here(tokens, num_prompt, decoding) == allowed_by(processor, tokens)

    def test_suppressed_after_a_forced_beginning(self, tokens: list[int], num_prompt: int) -> None:
        """With a forced BOS, transformers counts the beginning from the token after it (for one-token prompts)."""
        decoding = Decoding(max_tokens=20, begin_suppress_tokens=(1, 8), forced_bos_token_id=2)
        begin = num_prompt + 1 if num_prompt == 1 else num_prompt
        if len(tokens) > 1:
            processor = SuppressTokensAtBeginLogitsProcessor([1, 8], begin)
            assert allowed_here(tokens, num_prompt, decoding) == allowed_by(processor, tokens)

    def test_forced_bos(self, tokens: list[int], num_prompt: int) -> None:
        decoding = Decoding(max_tokens=20, forced_bos_token_id=2)
        assert allowed_here(tokens, num_prompt, decoding) == allowed_by(ForcedBOSTokenLogitsProcessor(2), tokens)

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
    def test_forced_eos(self, tokens: list[int], num_prompt: int, max_tokens: int) -> None:
        decoding = Decoding(max_tokens=max_tokens, forced_eos_token_ids=(2, 4))
        processor = ForcedEOSTokenLogitsProcessor(num_prompt + max_tokens, [2, 4])
        assert allowed_here(tokens, num_prompt, decoding) == allowed_by(processor, tokens)


# ------------------------------------------------------------------ the buffer of ints


class TestIntBuffer:
    def test_it_is_a_list_of_ints(self) -> None:
        buffer, expected = IntBuffer([1, 2]), [1, 2]
        for value in range(100):
            buffer.append(value)
            expected.append(value)
            if value % 7 == 0:
                buffer.extend([value] * 5)
                expected += [value] * 5
        assert list(buffer) == expected
        assert len(buffer) == len(expected)
        assert (buffer[0], buffer[-1], buffer[5]) == (expected[0], expected[-1], expected[5])
        assert buffer.view(3, 9).tolist() == expected[3:9]
        assert buffer.view(3).tolist() == expected[3:]
        assert buffer.view().dtype == np.int32

    def test_a_copy_goes_its_own_way(self) -> None:
        buffer = IntBuffer([1, 2, 3])
        copy = IntBuffer([7] * 40)
        copy.assign(buffer)
        copy.append(4)
        copy[0] = 9
        buffer.append(5)
        assert (list(buffer), list(copy)) == ([1, 2, 3, 5], [9, 2, 3, 4])
        buffer.assign(IntBuffer([1, 2, *range(40)]), 2)
        assert list(buffer) == [1, 2, *range(40)]

    @pytest.mark.parametrize("index", [3, -4, 100])
    def test_outside(self, index: int) -> None:
        with pytest.raises(IndexError):
            IntBuffer([1, 2, 3])[index]
