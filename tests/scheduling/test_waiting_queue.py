"""The queue of what waits: tenants in turn, and no trace of those that do not wait."""

from __future__ import annotations

from collections import Counter, defaultdict

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from paged_simulator import make_request

from engine import MAX_PRIORITY
from engine.scheduling.block_pool import PageHasher
from engine.scheduling.queues import _SPARE, WaitingQueue
from engine.scheduling.sequence import SequenceGroup, Status

Line = tuple[str | None, bool]  # a tenant, and whether its background requests are meant

TENANTS = [None, "a", "b", "c"]
ROOT = PageHasher().root(None)


def make_group(number: int, tenant: str | None = None, priority: int = 0) -> SequenceGroup:
    return SequenceGroup(make_request(f"r{number}", [2], tenant=tenant, priority=priority), number, ROOT)


def line_of(group: SequenceGroup) -> Line:
    return group.request.tenant, group.is_background


class Turns(RuleBasedStateMachine):
    """Any order of arrivals, admissions, returns and departures.

    `passed[line]` counts how often each other line of the same kind was served since `line` began to wait or was last
    served, without the turns that were given back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.passed: dict[Line, Counter[Line]] = defaultdict(Counter)
        self.number = 0

    def lines(self) -> set[Line]:
        return {line_of(group) for group in self.waiting}

    @rule(tenant=st.sampled_from(TENANTS), priority=st.sampled_from([-1, 0, 1, MAX_PRIORITY]))
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
        line = line_of(group)
        assert not group.is_background or all(is_background for _, is_background in self.lines())
        own = [other for other in self.waiting if line_of(other) == line]
        assert group is min(own, key=lambda other: (other.request.priority, other.arrival))
        for other in self.lines() - {line}:
            if other[1] == group.is_background:
                self.passed[other][line] += 1
                assert self.passed[other][line] <= 1, "a tenant that waits is passed over twice"
        self.passed[line].clear()
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
            counts[line_of(group)] -= 1

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
        assert set(self.queue._lines) == {(*line, False) for line in self.lines()}
        assert self.queue.has_clients == any(not is_background for _, is_background in self.lines())
        assert sum(len(line.heap) for line in self.queue._lines.values()) <= 2 * len(self.waiting) + 8 * _SPARE
        for line in set(self.passed) - self.lines():
            del self.passed[line]


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
    assert list(queue._lines) == [("a", False, False)]
    assert len(queue._lines["a", False, False].heap) <= 2 + _SPARE
    queue.leave(blocking)
    assert queue.first() is None
    assert not queue._lines
