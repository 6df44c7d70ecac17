"""How sequences share pages, page by page. That answers stay right by that is what the simulator proves."""

from __future__ import annotations

import pytest

from engine.scheduling.block_pool import BlockPool, PageHasher
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.sequence import IntBuffer, Sequence
from engine.scheduling.tables import Tables

SIZE = 4


class House:
    """A pool, and sequences with tables."""

    def __init__(self) -> None:
        self.pool = BlockPool(20)
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, block_size=SIZE)
        self.tables = Tables(self.pool, PageHasher(), config)
        self.sequences: list[Sequence] = []

    def beams(self, num_computed: int, shared: int, *own: int) -> list[Sequence]:
        """Sequences whose first `shared` pages are the same; each has so many of its own after them."""
        common = self.pool.reserve(shared)
        for count in own:
            pages = self.pool.reserve(count)
            assert common is not None
            assert pages is not None
            sequence = Sequence(0, range(num_computed + 1), with_logprobs=False)
            sequence.num_computed = num_computed
            sequence.table = IntBuffer([*(self.pool.fork(common) if self.sequences else common), *pages])
            sequence.num_writable = sequence.table.size * SIZE
            self.sequences.append(sequence)
        return self.sequences

    def check(self, *pinned: int) -> None:
        self.pool.check_integrity([list(sequence.table) for sequence in self.sequences], pinned)


def test_a_page_of_its_own_that_is_written_next_is_kept_and_filled_by_a_copy() -> None:
    house = House()
    child, parent = house.beams(14, 2, 2, 2)
    before, theirs = list(child.table), list(parent.table)
    house.tables.share(child, parent)
    house.check()
    assert list(child.table) == [*theirs[:3], before[3]]
    assert list(parent.table) == theirs
    assert (child.num_writable, parent.num_writable) == (0, 16), "the parent's last page is its own still"
    needed, shared = house.tables.missing(child, 15)
    assert (needed, shared) == (0, False)
    assert house.tables.take(child, [], shared) == (theirs[3], before[3])
    house.check(theirs[3])
    assert (child.source, child.num_writable) == (0, 16)


@pytest.mark.parametrize("third", [False, True], ids=["no page begun", "a page that others hold"])
def test_without_such_a_page_all_are_shared(third: bool) -> None:
    house = House()
    child, parent = house.beams(14 if third else 16, 1, 3, 3)
    if third:
        other = Sequence(0, (), with_logprobs=False)
        house.tables.share(other, child)
        house.sequences.append(other)
    house.tables.share(child, parent)
    house.check()
    assert list(child.table) == list(parent.table)
    assert child.source == child.num_writable == parent.num_writable == 0
    needed, shared = house.tables.missing(parent, parent.num_computed + 1)
    assert (needed, shared) == (1, third)
    pages = house.pool.reserve(needed)
    assert pages is not None
    copy = house.tables.take(parent, list(pages), shared)
    assert copy == ((child.table[3], pages[0]) if third else None)
    house.check(*([] if copy is None else copy[:1]))
    assert house.tables.missing(child, child.num_computed + 1) == (int(not third), False)


def test_who_has_no_pages_shares_all() -> None:
    house = House()
    (parent,) = house.beams(6, 2, 0)
    child = Sequence(0, (), with_logprobs=False)
    house.sequences.append(child)
    child.follow(parent)
    house.tables.share(child, parent)
    house.check()
    assert list(child.table) == list(parent.table)
    assert list(child.tokens) == list(range(7))
    assert child.num_writable == parent.num_writable == 0


def test_who_gives_up_its_pages_has_nothing_to_be_copied() -> None:
    house = House()
    child, parent = house.beams(14, 2, 2, 2)
    house.tables.share(child, parent)
    assert child.source
    house.tables.release(child)
    house.check()
    assert child.source == child.num_writable == 0
