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
