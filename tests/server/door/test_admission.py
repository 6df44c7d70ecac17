"""Admission: what is reserved is released, however a request ends, and the bounds hold at every moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.admission import LONGEST_WAIT, Admission, LocalReservation, estimate_tokens
from server.door.full import AT_ONCE, LONGEST_PAUSE, MOST_PAUSING, PER_SECOND, FullGate
from server.errors import ApiError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    max_running: int = 2, max_queued: int = 3, max_queued_tokens: int = 100, **more: Any
) -> tuple[Admission, list[str], Clock]:
    reasons: list[str] = []
    clock = Clock()
    admission = Admission(
        max_running=max_running,
        max_queued=max_queued,
        max_queued_tokens=max_queued_tokens,
        rejected=reasons.append,
        clock=clock,
        **more,
    )
    return admission, reasons, clock


def refusal(admission: Admission, prompts: int, tokens: int, *whose: Any) -> ApiError:
    before = admission.num_prompts, admission.num_queued_tokens
    with pytest.raises(ApiError) as refused:
        admission.reserve(prompts, tokens, *whose)
    assert (admission.num_prompts, admission.num_queued_tokens) == before
    return refused.value


def test_no_more_prompts_than_run_and_queue() -> None:
    admission, reasons, _ = make()
    reservations = [admission.reserve(1, 1) for _ in range(5)]
    problem = refusal(admission, 1, 1)
    assert problem.status_code == 503
    assert problem.code == "overloaded"
    assert (problem.headers or {})["Retry-After"] == "1"
    for part in ("max_num_seqs (2) + max_num_queued_reqs (3)", "5 prompts", "--max-num-queued-reqs"):
        assert part in problem.message
    assert reasons == ["queue_full"]
    with reservations[0]:
        pass
    admission.reserve(1, 1)


def test_a_request_takes_a_slot_per_prompt_and_gives_each_back_when_it_ends() -> None:
    admission, _, _ = make()
    with admission.reserve(4, 8) as reservation:
        reservation.measure([2, 2, 2, 2])
        refusal(admission, 2, 1)
        reservation.finished(3)
        assert (admission.num_prompts, admission.num_queued_tokens) == (3, 6)
        with admission.reserve(2, 1):
            pass
    assert (admission.num_prompts, admission.num_queued_tokens) == (0, 0)
    assert reservation.num_unfinished == 3


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


def test_the_truth_replaces_the_estimate() -> None:
    admission, _, _ = make()
    with admission.reserve(1, 90), pytest.raises(ApiError) as refused, admission.reserve(1, 5) as second:
        second.measure([11])
    assert refused.value.status_code == 503
    assert (admission.num_prompts, admission.num_queued_tokens) == (0, 0)


def test_a_lone_waiting_request_may_be_of_any_size() -> None:
    admission, _, _ = make()
    with admission.reserve(2, 500) as reservation:
        reservation.measure([400, 600])
        refusal(admission, 1, 1)


def test_retry_after_follows_the_recent_rate() -> None:
    admission, _, clock = make(max_running=1, max_queued=0)
    for _ in range(10):  # three seconds each, and long idle times between them
        clock.now += 500.0
        with admission.reserve(1, 1):
            clock.now += 3.0
    with admission.reserve(1, 1):
        assert 2 <= int((refusal(admission, 1, 1).headers or {})["Retry-After"]) <= 4
        clock.now += 100_000
        assert (refusal(admission, 1, 1).headers or {})["Retry-After"] == str(LONGEST_WAIT)


def begin(admission: Admission, count: int, tenant: str | None = None) -> list[LocalReservation]:
    """Prompts with a first token each."""
    reservations = [admission.reserve(1, 1, tenant) for _ in range(count)]
    for reservation in reservations:
        reservation.started(0)
    return reservations


def end(reservations: Iterable[LocalReservation]) -> None:
    for reservation in reservations:
        with reservation:
            reservation.finished(0)


# ---------------------------------------------------------------- by time


def test_what_would_wait_too_long_is_refused_at_once() -> None:
    admission, reasons, clock = make(max_running=4, max_queued=100, max_queue_time=2.0)
    reservations = begin(admission, 4)
    clock.now += 4.0
    end(reservations)  # four places for four seconds each: one comes free each second
    reservations = begin(admission, 4)
    admission.reserve(1, 1)
    problem = refusal_after(admission, 1)
    assert (problem.status_code, problem.code) == (503, "overloaded")
    for part in ("about 3.0 s", "2 s (max_queue_time)", "--max-queue-time"):
        assert part in problem.message
    assert (problem.headers or {})["Retry-After"] == "1"
    assert reasons == ["queue_time", "queue_time"]
    with pytest.raises(ApiError):
        admission.check()
    end(reservations[:2])
    admission.check()


def refusal_after(admission: Admission, accepted: int) -> ApiError:
    """The refusal of the prompt that comes after so many more that wait."""
    for _ in range(accepted):
        admission.reserve(1, 1)
    with pytest.raises(ApiError):
        admission.check()
    return refusal(admission, 1, 1)


def test_nothing_that_finds_nothing_waiting_is_refused_by_time() -> None:
    admission, reasons, clock = make(max_running=1, max_queued=9, max_queue_time=0.1, lacks_room=lambda: True)
    reservations = begin(admission, 1)
    clock.now += 1000.0
    end(reservations)
    begin(admission, 1)
    admission.check()
    admission.reserve(1, 1)
    refusal(admission, 1, 1)
    assert reasons == ["queue_time"]


def test_where_places_are_free_only_counts_decide() -> None:
    """However slow first tokens are."""
    admission, reasons, clock = make(max_running=50, max_queued=0, max_queue_time=0.1, max_queued_tokens=10**6)
    for _ in range(50):
        admission.reserve(1, 1)
        clock.now += 100.0
    assert reasons == []
    refusal(admission, 1, 1)
    assert reasons == ["queue_full"]


def test_nothing_was_measured_yet() -> None:
    """A crowd on a service that has just begun: counts decide, until it shows that nothing begins."""
    admission, reasons, clock = make(max_running=1, max_queued=20, max_queue_time=1.0, lacks_room=lambda: True)
    for _ in range(10):
        admission.reserve(1, 1)
    assert reasons == []
    clock.now += 0.5
    refusal(admission, 1, 1)
    assert reasons == ["queue_time"]


def test_without_a_setting_the_wait_is_half_of_a_first_tokens_time() -> None:
    admission, reasons, clock = make(max_running=4, max_queued=100, max_queue_time=None)
    reservations = begin(admission, 4)
    admission.reserve(1, 1)  # one may always wait
    problem = refusal(admission, 1, 1)
    assert "not known yet" in problem.message
    assert "--max-queue-time" in problem.message
    end(reservations)

    admission, reasons, clock = make(max_running=4, max_queued=100, max_queue_time=None)
    for _ in range(3):
        reservations = [admission.reserve(1, 1) for _ in range(4)]
        clock.now += 5.0  # to the first tokens
        for reservation in reservations:
            reservation.started(0)
        clock.now += 4.0  # to the ends: one in each second
        end(reservations)
    reservations = [admission.reserve(1, 1) for _ in range(4)]
    clock.now += 5.0
    for reservation in reservations:
        reservation.started(0)
    admission.reserve(1, 1)
    admission.reserve(1, 1)  # waits for about 2 s, and half of 5 s are 2.5
    problem = refusal(admission, 1, 1)
    assert "about 3.0 s" in problem.message
    assert "2.5 s, half the time to first token" in problem.message
    assert reasons == ["queue_time"]


def test_one_may_wait_for_a_place_whatever_runs_or_is_about_to() -> None:
    """Also where those with places have no first token yet."""
    admission, reasons, _ = make(max_running=2, max_queued=100, max_queue_time=None)
    for _ in range(3):
        admission.reserve(1, 1)
    refusal(admission, 1, 1)
    assert reasons == ["queue_time"]


def test_what_has_waited_says_nothing_about_first_tokens() -> None:
    """Else the time that may be waited would grow with the waits."""
    admission, _, clock = make(max_running=1, max_queued=100, max_queue_time=None)
    for _ in range(20):
        reservations = begin(admission, 1)
        waiting = admission.reserve(1, 1)
        clock.now += 10.0
        end(reservations)
        waiting.started(0)
        end([waiting])
    begin(admission, 1)
    admission.reserve(1, 1)
    assert "more than 0 s, half" in refusal(admission, 1, 1).message


def test_idle_times_are_not_measured() -> None:
    room = [True]
    admission, _, clock = make(max_running=1, max_queued=20, max_queue_time=5.0, lacks_room=lambda: not room[0])
    for _ in range(30):
        running = begin(admission, 1)
        room[0] = False
        waiting = admission.reserve(1, 1)
        clock.now += 1.0
        end(running)
        waiting.started(0)
        end([waiting])
        room[0] = True
        clock.now += 1000.0
    begin(admission, 1)
    room[0] = False
    for _ in range(5):  # each waits for about one second more
        admission.reserve(1, 1)
    refusal(admission, 1, 1)


def test_a_deadline_that_cannot_be_met_is_refused() -> None:
    admission, reasons, clock = make(max_running=1, max_queued=20)
    for _ in range(3):
        reservations = begin(admission, 1)
        clock.now += 2.0
        end(reservations)
    begin(admission, 1)
    admission.reserve(1, 1, None, clock.now + 1.0)  # nothing waits
    admission.reserve(1, 1, None, clock.now + 5.0)
    problem = refusal(admission, 1, 1, None, clock.now + 4.0)
    assert "about 6.0 s" in problem.message
    assert "ends in 4.0 s" in problem.message
    assert (problem.headers or {})["Retry-After"] == "2"
    assert reasons == ["deadline"]
    admission.reserve(1, 1, None, clock.now + 7.0)


def test_a_tenants_wait_is_that_of_its_turn() -> None:
    admission, reasons, clock = make(max_running=1, max_queued=99, max_queue_time=5.0)
    reservations = begin(admission, 1, "a")
    clock.now += 1.0
    end(reservations)
    begin(admission, 1, "a")
    for _ in range(5):
        admission.reserve(1, 1, "a")
    refusal(admission, 1, 1, "a")
    admission.check("b")
    admission.reserve(1, 1, "b")  # one of a, then this
    admission.reserve(1, 1, "b")
    refusal(admission, 1, 1, "b")
    admission.check("c")
    assert reasons == ["queue_time"] * 2


# ---------------------------------------------------------------- tenants


def test_a_tenant_that_fills_the_service_does_not_lock_others_out() -> None:
    admission, reasons, _ = make(max_running=4, max_queued=28)
    mine = [admission.reserve(1, 1, "a") for _ in range(32)]
    refusal(admission, 1, 1, "a")
    theirs = [admission.reserve(1, 1, "b") for _ in range(4)]  # an eighth of 32 beyond it
    refusal(admission, 1, 1, "b")
    while len(theirs) < 16:  # each place that comes free goes to the one with less than its share
        with mine.pop():
            pass
        refusal(admission, 1, 1, "a")
        theirs.append(admission.reserve(1, 1, "b"))
    with mine.pop():
        pass
    refusal(admission, 1, 1, "b")
    assert set(reasons) == {"queue_full"}
    third = admission.reserve(1, 1, "c")
    for reservation in (*mine, *theirs, third):
        with reservation:
            pass
    assert admission.num_prompts == admission.num_queued_tokens == 0
    assert not admission._accounts


def test_a_tenant_that_fills_the_waiting_tokens_does_not_lock_others_out() -> None:
    admission, reasons, _ = make(max_running=9, max_queued=91)
    admission.reserve(1, 60, "a")
    admission.reserve(1, 40, "a")
    refusal(admission, 1, 1, "a")
    admission.reserve(1, 500, "b")  # the first one, of any size
    refusal(admission, 1, 1, "b")
    refusal(admission, 1, 1, "a")
    assert reasons == ["queued_tokens"] * 3


def test_one_tenant_alone_has_no_more_than_the_bounds() -> None:
    for tenant in (None, "a"):
        admission, _, _ = make()
        for _ in range(5):
            admission.reserve(1, 20, tenant)
        refusal(admission, 1, 1, tenant)


def test_estimates_are_never_nothing() -> None:
    assert estimate_tokens("") == 1
    assert estimate_tokens("x" * 400) == 101


@dataclass
class Held:
    """What the model knows of a request: tokens of the prompts that wait, or one estimate for all."""

    reservation: LocalReservation
    tenant: str | None
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

    @rule(prompts=st.integers(1, 5), tokens=st.integers(0, 120), tenant=st.sampled_from([None, None, "a", "b"]))
    def reserve(self, prompts: int, tokens: int, tenant: str | None) -> None:
        in_service, waiting = self.totals()
        fits = in_service + prompts <= 5 and (not waiting or waiting + tokens <= 100)
        others = any(one.tenant != tenant and (one.prompts or one.estimate) for one in self.held)
        try:
            reservation = self.admission.reserve(prompts, tokens, tenant)
        except ApiError:
            self.num_refused += 1
            assert not fits
        else:
            assert fits or others
            self.held.append(Held(reservation, tenant, set(range(prompts)), {}, tokens))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 60), min_size=5, max_size=5))
    def measure(self, data: st.DataObject, tokens: list[int]) -> None:
        one = self.pick(data)
        if one.waiting:
            return
        exact = dict(enumerate(tokens[: len(one.prompts)]))
        try:
            one.reservation.measure(list(exact.values()))
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
        one.reservation.started(index)
        one.waiting[index] = 0

    @precondition(lambda self: any(one.waiting and one.prompts for one in self.held))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from([one for one in self.held if one.waiting and one.prompts]))
        index = data.draw(st.sampled_from(sorted(one.prompts)))
        one.reservation.finished(index)
        one.reservation.finished(index)  # once more changes nothing
        one.prompts.discard(index)
        one.waiting[index] = 0

    @precondition(lambda self: self.held)
    @rule(data=st.data(), problem=st.sampled_from([None, RuntimeError, asyncio.CancelledError]))
    def end(self, data: st.DataObject, problem: type[BaseException] | None) -> None:
        self.leave(self.pick(data), problem)

    def leave(self, one: Held, problem: type[BaseException] | None = None) -> None:
        with contextlib.suppress(RuntimeError, asyncio.CancelledError), one.reservation:
            if problem is not None:
                raise problem
        assert one.reservation.num_unfinished == len(one.prompts)
        for index in range(len(one.waiting)):  # late news change nothing
            one.reservation.started(index)
            one.reservation.finished(index)
        self.held.remove(one)

    def totals(self) -> tuple[int, int]:
        prompts = sum(len(one.prompts) for one in self.held)
        return prompts, sum(one.estimate + sum(one.waiting.values()) for one in self.held)

    @invariant()
    def counts_are_those_of_the_open_reservations(self) -> None:
        assert (self.admission.num_prompts, self.admission.num_queued_tokens) == self.totals()
        assert len(self.reasons) <= self.num_refused
        assert self.admission.num_prompts <= self.admission.max_prompts + 1
        accounts = self.admission._accounts
        assert set(accounts) <= {one.tenant for one in self.held}
        assert sum(account.waiting for account in accounts.values()) == self.admission._num_waiting
        assert self.admission._num_waiting == sum(sum(one.reservation._waits) for one in self.held)

    def teardown(self) -> None:
        while self.held:
            self.leave(self.held[-1])
        assert (self.admission.num_prompts, self.admission.num_queued_tokens) == (0, 0)


TestEndings = Endings.TestCase
TestEndings.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# ------------------------------------------------------------------ refusals at the door


class Refusing:
    """A gate whose service is always full, and a client that asks it; `pauses` has what each refusal waited for."""

    def __init__(self) -> None:
        self.clock, self.pauses = Clock(), list[float]()
        self.gate = FullGate(self._app, {"/v1/completions": self._check}, self.clock, self.pause)

    async def _app(self, *_: Any) -> None:
        raise AssertionError("the service is full")

    async def _check(self, tenant: str | None) -> None:
        raise ApiError(503, "full", code="overloaded")

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)

    async def ask(self) -> None:
        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await self.gate(scope, send, send)  # type: ignore[arg-type]


@pytest.mark.parametrize("clients", [20, 200])
async def test_clients_that_ask_again_at_once_are_slowed_down(clients: int) -> None:
    """20 of them get about 25 refusals a second, 200 get one a second each, instead of as many as the processor can
    make."""
    door, ends = Refusing(), [0.0] * clients
    count = 0
    while min(ends) < 10.0:
        number = ends.index(min(ends))
        door.clock.now, door.pauses = ends[number], []
        await door.ask()
        ends[number] += sum(door.pauses) + 0.001
        count += 1
    pace = max(PER_SECOND, clients / LONGEST_PAUSE)
    assert 9 * pace <= count - AT_ONCE <= 10 * pace + clients
    door.clock.now, door.pauses = 20.0, []
    for _ in range(AT_ONCE - 1):
        await door.ask()
    assert not door.pauses, "few refusals come at once"


async def test_few_refusals_are_held_at_a_time() -> None:
    door, held = Refusing(), asyncio.Event()

    async def pause(seconds: float) -> None:
        assert seconds <= LONGEST_PAUSE
        await held.wait()

    door.gate._pause = pause
    asked = [asyncio.create_task(door.ask()) for _ in range(AT_ONCE + MOST_PAUSING + 50)]
    await asyncio.sleep(0.05)
    assert sum(task.done() for task in asked) == AT_ONCE + 50
    held.set()
    await asyncio.gather(*asked)
    assert door.gate._num_pausing == 0
