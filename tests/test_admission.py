"""Admission: what is reserved is released, however a request ends, and the bounds hold at every moment."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.admission import LONGEST_WAIT, Admission, Ticket, estimate_tokens
from server.errors import ApiError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(max_running: int = 2, max_queued: int = 3, max_queued_tokens: int = 100) -> tuple[Admission, list[str], Clock]:
    reasons: list[str] = []
    clock = Clock()
    admission = Admission(
        max_running=max_running,
        max_queued=max_queued,
        max_queued_tokens=max_queued_tokens,
        rejected=reasons.append,
        clock=clock,
    )
    return admission, reasons, clock


def refusal(admission: Admission, prompts: int, tokens: int) -> ApiError:
    before = admission.num_prompts, admission.num_queued_tokens
    with pytest.raises(ApiError) as refused:
        admission.reserve(prompts, tokens)
    assert (admission.num_prompts, admission.num_queued_tokens) == before
    return refused.value


def test_no_more_prompts_than_run_and_queue() -> None:
    admission, reasons, _ = make()
    tickets = [admission.reserve(1, 1) for _ in range(5)]
    problem = refusal(admission, 1, 1)
    assert problem.status_code == 503
    assert problem.code == "overloaded"
    assert (problem.headers or {})["Retry-After"] == "1"
    for part in ("max_num_seqs (2) + max_num_queued_reqs (3)", "5 prompts", "--max-num-queued-reqs"):
        assert part in problem.message
    assert reasons == ["queue_full"]
    with tickets[0]:
        pass
    admission.reserve(1, 1)


def test_a_request_takes_a_slot_per_prompt_and_gives_each_back_when_it_ends() -> None:
    admission, _, _ = make()
    with admission.reserve(4, 8) as ticket:
        ticket.measure([2, 2, 2, 2])
        refusal(admission, 2, 1)
        ticket.finished(3)
        assert (admission.num_prompts, admission.num_queued_tokens) == (3, 6)
        with admission.reserve(2, 1):
            pass
    assert (admission.num_prompts, admission.num_queued_tokens) == (0, 0)
    assert ticket.num_unfinished == 3


def test_what_can_never_fit_is_not_asked_to_come_back() -> None:
    admission, reasons, _ = make()
    problem = refusal(admission, 6, 6)
    assert problem.status_code == 400
    assert "6 prompts" in problem.message
    assert "--max-num-queued-reqs" in problem.message
    assert reasons == []


def test_waiting_tokens_are_bounded_until_the_first_token() -> None:
    admission, reasons, _ = make()
    with admission.reserve(1, 60) as first:
        first.measure([60])
        problem = refusal(admission, 1, 41)
        assert problem.code == "overloaded"
        for part in ("60 prompt tokens", "41", "100 (max_num_queued_tokens)", "--max-num-queued-tokens"):
            assert part in problem.message
        assert reasons == ["queued_tokens"]
        first.started(0)
        with admission.reserve(1, 41):
            assert admission.num_queued_tokens == 41
    assert admission.num_queued_tokens == 0


def test_the_estimate_gives_way_to_the_truth() -> None:
    admission, _, _ = make()
    with admission.reserve(1, 90), pytest.raises(ApiError) as refused, admission.reserve(1, 5) as second:
        second.measure([11])
    assert refused.value.status_code == 503
    assert (admission.num_prompts, admission.num_queued_tokens) == (0, 0)


def test_whoever_waits_alone_may_be_of_any_size() -> None:
    admission, _, _ = make()
    with admission.reserve(2, 500) as ticket:
        ticket.measure([400, 600])
        refusal(admission, 1, 1)


def test_retry_after_follows_the_recent_rate() -> None:
    admission, _, clock = make(max_running=1, max_queued=0)
    for _ in range(10):  # one every three seconds
        clock.now += 3.0
        with admission.reserve(1, 1):
            pass
    with admission.reserve(1, 1):
        assert 2 <= int((refusal(admission, 1, 1).headers or {})["Retry-After"]) <= 4
        clock.now += 10_000
        assert (refusal(admission, 1, 1).headers or {})["Retry-After"] == str(LONGEST_WAIT)


def test_estimates_are_never_nothing() -> None:
    assert estimate_tokens("") == 1
    assert estimate_tokens("x" * 400) == 101


@dataclass
class Held:
    """What the model knows of a request: tokens of the prompts that wait, or one estimate for all."""

    ticket: Ticket
    prompts: set[int]
    waiting: dict[int, int]
    estimate: int


class Endings(RuleBasedStateMachine):
    """Requests that are measured, start, finish and leave in any order, against a model that adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.admission, self.reasons, _ = make()
        self.held: list[Held] = []
        self.num_refused = 0

    def pick(self, data: st.DataObject) -> Held:
        return data.draw(st.sampled_from(self.held))

    @rule(prompts=st.integers(1, 5), tokens=st.integers(0, 120))
    def reserve(self, prompts: int, tokens: int) -> None:
        in_service, waiting = self.totals()
        fits = in_service + prompts <= 5 and (not waiting or waiting + tokens <= 100)
        try:
            ticket = self.admission.reserve(prompts, tokens)
        except ApiError:
            self.num_refused += 1
            assert not fits
        else:
            assert fits
            self.held.append(Held(ticket, set(range(prompts)), {}, tokens))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 60), min_size=5, max_size=5))
    def measure(self, data: st.DataObject, tokens: list[int]) -> None:
        one = self.pick(data)
        if one.waiting:
            return
        exact = dict(enumerate(tokens[: len(one.prompts)]))
        try:
            one.ticket.measure(list(exact.values()))
        except ApiError:
            self.num_refused += 1
            self.leave(one)
        else:
            one.waiting, one.estimate = exact, 0

    @precondition(lambda self: any(one.waiting for one in self.held))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.held if one.waiting]))
        index = data.draw(st.sampled_from(sorted(one.waiting)))
        one.ticket.started(index)
        one.waiting[index] = 0

    @precondition(lambda self: any(one.waiting and one.prompts for one in self.held))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.held if one.waiting and one.prompts]))
        index = data.draw(st.sampled_from(sorted(one.prompts)))
        one.ticket.finished(index)
        one.ticket.finished(index)  # once more changes nothing
        one.prompts.discard(index)
        one.waiting[index] = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), problem=st.sampled_from([None, RuntimeError, asyncio.CancelledError]))
    def end(self, data: st.DataObject, problem: type[BaseException] | None) -> None:
        self.leave(self.pick(data), problem)

    def leave(self, one: Held, problem: type[BaseException] | None = None) -> None:
        with contextlib.suppress(RuntimeError, asyncio.CancelledError), one.ticket:
            if problem is not None:
                raise problem
        assert one.ticket.num_unfinished == len(one.prompts)
        for index in range(len(one.waiting)):  # late news change nothing
            one.ticket.started(index)
            one.ticket.finished(index)
        self.held.remove(one)

    def totals(self) -> tuple[int, int]:
        prompts = sum(len(one.prompts) for one in self.held)
        return prompts, sum(one.estimate + sum(one.waiting.values()) for one in self.held)

    @invariant()
    def counts_are_those_of_the_open_tickets(self) -> None:
        assert (self.admission.num_prompts, self.admission.num_queued_tokens) == self.totals()
        assert len(self.reasons) <= self.num_refused
        assert self.admission.num_prompts <= self.admission.max_prompts

    def teardown(self) -> None:
        while self.held:
            self.leave(self.held[-1])
        assert (self.admission.num_prompts, self.admission.num_queued_tokens) == (0, 0)


TestEndings = Endings.TestCase
TestEndings.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
