"""Turns: inputs of many requests on their way to the engine, each request in turn, never more than keep it busy."""

from __future__ import annotations

import pytest

from server.answering.turns import Lane, Turns


class Queue(Lane):
    """A lane that remembers what it handed over; some of its inputs cannot be."""

    def __init__(self, name: str, sizes: list[int], turns: Turns, log: list[str], broken: frozenset[int] = frozenset()):
        self.name, self.sizes, self.turns, self.log, self.broken = name, sizes, turns, log, broken
        self.next = 0

    @property
    def num_waiting(self) -> int:
        return len(self.sizes) - self.next

    def submit_next(self) -> None:
        number = self.next
        self.next += 1
        if number not in self.broken:
            self.log.append(f"{self.name}{number}")
            self.turns.began(self.sizes[number])


def test_each_lane_in_turn() -> None:
    turns, log = Turns(step_inputs=1, step_tokens=100), []
    long = Queue("a", [1] * 6, turns, log)
    turns.join(long)
    assert log == ["a0", "a1"]
    turns.join(Queue("b", [1] * 2, turns, log))
    turns.join(Queue("c", [1], turns, log))
    assert turns.num_waiting == 4 + 2 + 1
    while len(log) < 9:
        turns.ended(1)
    assert log == ["a0", "a1", "a2", "b0", "c0", "a3", "b1", "a4", "a5"]
    assert turns.num_waiting == 0


def test_each_tenant_in_turn_and_of_its_lanes_each() -> None:
    turns, log = Turns(step_inputs=1, step_tokens=100), []
    for name, tenant in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y"), ("e", None)):
        lane = Queue(name, [1] * 3, turns, log)
        lane.tenant = tenant
        turns.join(lane)
    assert log == ["a0", "a1"]
    while turns.num_waiting:
        turns.ended(1)
    assert log[2:11] == ["a2", "d0", "e0", "b0", "d1", "e1", "c0", "d2", "e2"]
    assert log[11:] == ["b1", "c1", "b2", "c2"]
    assert not turns._lanes


def test_background_inputs_take_no_clients_room() -> None:
    turns, log = Turns(step_inputs=1, step_tokens=100), []
    turns.behind.join(Queue("line", [1] * 6, turns.behind, log))
    turns.join(Queue("a", [1] * 3, turns, log))
    assert log == ["line0", "line1", "a0", "a1"]
    assert turns.num_waiting == 4 + 1
    turns.behind.ended(1)
    assert log[4:] == ["line2"]


def test_a_lane_that_leaves_takes_its_tenant_along() -> None:
    turns, log = Turns(step_inputs=1, step_tokens=100), []
    lanes = [Queue(name, [1] * 9, turns, log) for name in "ab"]
    for lane in lanes:
        lane.tenant = "x"
        turns.join(lane)
    for lane in lanes:
        turns.leave(lane)
    assert not turns._lanes


@pytest.mark.parametrize(
    ("inputs", "tokens", "size", "begun"),
    [(4, 1000, 10, 8), (100, 100, 10, 20), (100, 100, 90, 3), (100, 100, 5000, 2), (1, 1, 1, 2)],
    ids=["inputs", "tokens", "over", "each-longer-than-a-step", "least"],
)
def test_what_two_steps_hold(inputs: int, tokens: int, size: int, begun: int) -> None:
    turns, log = Turns(inputs, tokens), []
    turns.join(Queue("a", [size] * 50, turns, log))
    assert len(log) == begun
    turns.ended(size)
    assert len(log) == begun + 1


def test_it_follows_what_steps_hold() -> None:
    turns, log = Turns(step_inputs=1000, step_tokens=1000), []
    turns.join(Queue("a", [1] * 10_000, turns, log))

    def in_the_engine() -> int:
        return turns._tokens

    assert in_the_engine() == 256
    for held in (512, 1024, 2000, 2000):  # steps take all that is there, so that they might take more
        for _ in range(10):
            turns.ended(1)
        turns.stepped(10, num_waiting=0)
        assert in_the_engine() == held
    turns.stepped(30, num_waiting=900)  # a slow machine: two such steps are enough
    for _ in range(1990):
        turns.ended(1)
    assert in_the_engine() == 60
    turns.stepped(0, num_waiting=5)
    for _ in range(60):
        turns.ended(1)
    assert in_the_engine() == 2, "never none"
    turns.stepped(2, num_waiting=0)
    assert in_the_engine() == 2
    turns.stepped(2, num_waiting=0)
    assert in_the_engine() == 4
    turns.stepped(2, num_waiting=0)
    turns.leave(turns._lanes[None][0])
    before = turns._max_tokens
    for waiting in (0, 9):
        turns.stepped(1000, waiting)
    assert turns._max_tokens == before, "steps without inputs say nothing about them"


def test_a_lane_that_left_gets_no_turn_and_its_places_go_to_others() -> None:
    turns, log = Turns(1, 100), []
    gone, other = Queue("a", [1] * 9, turns, log), Queue("b", [1] * 9, turns, log)
    turns.join(gone)
    turns.join(other)
    turns.leave(gone)
    turns.leave(gone)
    turns.ended(1)
    turns.ended(1)
    assert log == ["a0", "a1", "b0", "b1"]
    assert turns.num_waiting == 7


def test_what_could_not_be_handed_over_takes_no_place() -> None:
    turns, log = Turns(1, 100), []
    turns.join(Queue("a", [1] * 5, turns, log, broken=frozenset((0, 2, 3))))
    assert log == ["a1", "a4"]
