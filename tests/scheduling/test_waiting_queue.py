"""The queue of what waits: tenants in turn, and no trace of those that do not wait."""

from __future__ import annotations

from collections import Counter, defaultdict

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from paged_simulator import make_request

from engine.scheduling.block_pool import PageHasher
from engine.scheduling.queues import _SPARE, WaitingQueue
from engine.scheduling.sequence import SequenceGroup, Status

TENANTS = [None, "a", "b", "c"]
ROOT = PageHasher().root(None)


def make_group(number: int, tenant: str | None = None, priority: int = 0) -> SequenceGroup:
    return SequenceGroup(make_request(f"r{number}", [2], tenant=tenant, priority=priority), number, ROOT)


class Turns(RuleBasedStateMachine):
    """Any order of arrivals, admissions, returns and departures.

    `passed[tenant]` counts how often each other one was served since `tenant` began to wait or was last served,
    without the turns that were given back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.passed: dict[str | None, Counter[str | None]] = defaultdict(Counter)
        self.number = 0

    def tenants(self) -> set[str | None]:
        return {group.request.tenant for group in self.waiting}

    @rule(tenant=st.sampled_from(TENANTS), priority=st.integers(-1, 1))
    def arrive(self, tenant: str | None, priority: int) -> None:
        group = make_group(self.number, tenant, priority)
        self.number += 1
        self.queue.push(group)
        self.waiting.append(group)

    @precondition(lambda self: self.waiting)
    @rule()
    def admit(self) -> None:
        group = self.queue.first()
        assert group is not None
        tenant = group.request.tenant
        own = [other for other in self.waiting if other.request.tenant == tenant]
        assert group is min(own, key=lambda other: (other.request.priority, other.arrival))
        for other in self.tenants() - {tenant}:
            self.passed[other][tenant] += 1
            assert self.passed[other][tenant] <= 1, "a tenant that waits is passed over twice"
        self.passed[tenant].clear()
        self.queue.pop(group)
        group.status = Status.RUNNING
        self.waiting.remove(group)
        self.running.append(group)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.running))
        self.running.remove(group)
        self.queue.push_back(group)
        self.waiting.append(group)
        for counts in self.passed.values():
            counts[group.request.tenant] -= 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(group)
        self.queue.leave(group)
        group.status = Status.FINISHED

    @invariant()
    def holds_what_waits(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert bool(self.queue) == bool(self.waiting)
        assert set(self.queue._lines) == {(tenant, False) for tenant in self.tenants()}
        assert sum(len(line.heap) for line in self.queue._lines.values()) <= 2 * len(self.waiting) + 4 * _SPARE
        for tenant in set(self.passed) - self.tenants():
            del self.passed[tenant]


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_nothing_is_kept_of_what_left() -> None:
    queue = WaitingQueue()
    blocking = make_group(0, "a")
    queue.push(blocking)
    for number in range(1, 2000):
        group = make_group(number, "a" if number % 2 else f"tenant {number}")
        queue.push(group)
        queue.leave(group)
        group.status = Status.FINISHED
    assert queue.first() is blocking
    assert list(queue._lines) == [("a", False)]
    assert len(queue._lines["a", False].heap) <= 2 + _SPARE
    queue.leave(blocking)
    assert queue.first() is None
    assert not queue._lines
