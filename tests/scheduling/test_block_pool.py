"""The pool of pages against a naive model, in any order of operations."""

from __future__ import annotations

import itertools
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from paged_simulator import is_published

from engine.scheduling.block_pool import CACHED, FREE, HELD, BlockPool, PageHasher

KEY = b"k" * 32


class Table:
    """A block table and what its owner wrote into the pages; page 0 where it has given one up."""

    def __init__(self, pages: list[int], content: list[int]):
        self.pages = pages
        self.content = content


class Listener:
    """What the pool's own words say is known."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()

    def removed(self, page_hash: bytes) -> None:
        self.known.remove(page_hash)

    def cleared(self) -> None:
        self.known.clear()


class PoolMachine(RuleBasedStateMachine):
    """Owners follow the discipline: shared and published pages are copied before they are written."""

    @initialize(total=st.integers(2, 10))
    def start(self, total: int) -> None:
        self.pool = BlockPool(total)
        self.listener = self.pool.listener = Listener()
        self.memory: dict[int, int] = {}
        self.tables: list[Table] = []
        self.pinned: list[tuple[int, int]] = []  # page, content
        self.page_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.cached: list[int] = []  # oldest first
        self.num_taken, self.taken_before = 0, dict[int, int]()  # pages reserved, and before each cached one
        self.found: set[int] = set()  # pages that were adopted since they were written
        self.hasher = PageHasher(KEY)

    # ------------------------------------------------------------- the model

    def refs(self) -> Counter[int]:
        return Counter(page for table in self.tables for page in table.pages if page)

    def in_use(self) -> set[int]:
        return set(self.refs()) | {page for page, _ in self.pinned}

    def expect_evicted(self, pages: list[int]) -> None:
        """Pages reserved: free ones first, then the least recently used cached ones, in order. One that was found
        counts as used when a quarter of the pool's pages had been taken after it."""
        evicted = [page for page in pages if page in self.cached]
        later = self.pool.total // 4
        ages = {
            page: (self.taken_before[page] + later * (page in self.found), page in self.found) for page in self.cached
        }
        assert evicted == sorted(self.cached, key=ages.__getitem__)[: len(evicted)]
        free = self.pool.total - len(self.in_use()) - len(self.cached)
        assert len(evicted) == max(0, len(pages) - free)
        assert not set(pages) & self.in_use(), "a page in use is handed out"
        assert len(set(pages)) == len(pages)
        for page in evicted:
            self.cached.remove(page)
            self.found.discard(page)
            del self.page_of[self.hash_of.pop(page)]

    def reserve_pages(self, count: int) -> list[int] | None:
        free = self.pool.total - len(self.in_use())  # cached ones can be had, too
        pages = self.pool.reserve(count)
        assert (pages is None) == (count > free)
        if pages is not None:
            assert len(pages) == count
            self.expect_evicted(pages)
            self.num_taken += count
        return pages

    def drop_references(self, pages: list[int]) -> None:
        """What the model expects of pages whose table is gone: the last becomes the oldest cached one."""
        used = self.in_use()
        for page in reversed(pages):
            if page not in used and page in self.hash_of:
                self.cached.append(page)
                self.taken_before[page] = self.num_taken

    def chain(self, content: list[int]) -> list[bytes]:
        hashes, parent = [], self.hasher.root(None)
        for value in content:
            parent = self.hasher.extend(parent, np.array([value], dtype=np.int32))
            hashes.append(parent)
        return hashes

    # ------------------------------------------------------------- operations

    @rule(content=st.lists(st.integers(0, 1), max_size=2))
    def reserve(self, content: list[int]) -> None:
        pages = self.reserve_pages(len(content))
        if pages is not None:
            self.memory.update(zip(pages, content, strict=True))
            self.tables.append(Table(pages, content))

    @rule(
        content=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        seen=st.sampled_from([None, None, 0, 1, 2]),
        keep=st.sampled_from([False, False, True]),
    )
    def live(self, content: list[int], seen: int | None, keep: bool) -> None:
        """A request's way: take up what is known, reserve the rest, write, publish, leave or stay."""
        self.match_and_adopt(content, seen)
        table = self.tables[-1]
        hits = len(table.pages)
        rest = self.reserve_pages(len(content) - hits)
        if rest is not None:
            self.memory.update(zip(rest, content[hits:], strict=True))
            table.pages, table.content = [*table.pages, *rest], content
            self.publish_table(table)
        if not keep:
            self.free_table(table)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if not 0 < len(self.tables) < 6:
            return
        parent = data.draw(st.sampled_from(self.tables))
        pages = self.pool.fork(parent.pages)
        assert pages == parent.pages
        self.tables.append(Table(pages, list(parent.content)))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if not self.tables:
            return
        self.free_table(data.draw(st.sampled_from(self.tables)))

    def free_table(self, table: Table) -> None:
        self.tables.remove(table)
        self.pool.free(table.pages)
        self.drop_references(table.pages)

    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """The first pages of a table are not needed any more; its length stays."""
        tables = [table for table in self.tables if any(table.pages)]
        if not tables:
            return
        table = data.draw(st.sampled_from(tables))
        count = data.draw(st.integers(1, len(table.pages)))
        gone, table.pages = table.pages[:count], [0] * count + table.pages[count:]
        self.pool.free(gone)
        self.drop_references(gone)

    @rule(data=st.data(), value=st.integers(0, 4))
    def write(self, data: st.DataObject, value: int) -> None:
        """The owner of a table changes one of its pages."""
        if not self.refs():
            return
        table = data.draw(st.sampled_from([table for table in self.tables if any(table.pages)]))
        place = data.draw(st.sampled_from([place for place, page in enumerate(table.pages) if page]))
        page = table.pages[place]
        assert self.pool.is_shared(page) == (self.refs()[page] > 1)
        assert is_published(self.pool, page) == (page in self.hash_of)
        if self.pool.is_shared(page) or is_published(self.pool, page) or page in {p for p, _ in self.pinned}:
            fresh = self.reserve_pages(1)
            if fresh is None:
                return
            self.pool.pin(page)
            self.pinned.append((page, self.memory[page]))
            self.pool.free([page])
            table.pages = [*table.pages[:place], fresh[0], *table.pages[place + 1 :]]
            page = fresh[0]
        self.memory[page] = value
        table.content = [*table.content[:place], value, *table.content[place + 1 :]]

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Pin a held page, or undo the oldest pins."""
        if self.refs() and len(self.pinned) < 2:
            page = data.draw(st.sampled_from(sorted(self.refs())))
            self.pool.pin(page)
            self.pinned.append((page, self.memory[page]))
        else:
            self.unpin()

    @rule()
    def unpin(self) -> None:
        """The copies are done."""
        while self.pinned:
            page, content = self.pinned.pop(0)
            assert self.memory[page] == content, "the source of a pending copy changed"
            self.pool.unpin(page)
            self.drop_references([page])

    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        if not self.refs():
            return
        self.publish_table(data.draw(st.sampled_from([table for table in self.tables if any(table.pages)])))

    def publish_table(self, table: Table) -> None:
        for page, page_hash in zip(table.pages, self.chain(table.content), strict=True):
            if not page:
                continue
            new = page_hash not in self.page_of and page not in self.hash_of
            assert self.pool.publish(page, page_hash) == new
            if new:
                self.page_of[page_hash] = page
                self.hash_of[page] = page_hash
                self.listener.known.add(page_hash)

    @rule()
    def clear(self) -> None:
        done = self.pool.clear()
        assert done == (not self.in_use())
        if done:
            self.page_of, self.hash_of, self.cached, self.found = {}, {}, [], set()

    @rule(content=st.lists(st.integers(0, 1), max_size=4), seen=st.sampled_from([None, None, 0, 1, 2, 3]))
    def match_and_adopt(self, content: list[int], seen: int | None) -> None:
        hashes = self.chain(content)
        expected: list[int] = []
        for end in range(1, len(hashes) + 1):
            first = 0 if seen is None else max(0, end - seen)
            if all(page_hash in self.page_of for page_hash in hashes[first:end]):
                expected = [0] * first + [self.page_of[page_hash] for page_hash in hashes[first:end]]
        before = self.pool.num_available
        pages = self.pool.match(hashes, seen)
        assert pages == expected
        assert self.pool.num_available == before, "a match takes nothing"
        fresh = [page for page in pages if page in self.cached]
        assert self.pool.count_cached(pages) == len(fresh)
        assert self.pool.adopt(pages) == pages
        assert self.pool.num_available == before - len(fresh)
        for page in fresh:
            self.cached.remove(page)
        self.found |= set(pages)
        self.tables.append(Table(pages, content[: len(pages)]))

    # ------------------------------------------------------------- always

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert pool.num_free + pool.num_held + pool.num_cached == pool.total
        assert pool.num_held == len(self.in_use())
        assert pool.num_cached == len(self.cached)
        assert pool.num_available == pool.num_free + pool.num_cached
        assert pool.peak_held >= pool.num_held
        assert self.listener.known == set(self.page_of)
        refs = self.refs()
        for page in range(1, pool.total + 1):
            assert pool.references(page) == refs[page]
            held, cached = page in self.in_use(), page in self.cached
            assert pool.snapshot()[page - 1] == (HELD if held else CACHED if cached else FREE)
            assert is_published(pool, page) == (page in self.hash_of)
        if not self.pinned:
            pool.check_integrity([table.pages for table in self.tables])

    @invariant()
    def nobody_else_wrote(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                for page, value in zip(table.pages, table.content, strict=True):
                    assert not page or self.memory[page] == value

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for page, content in self.pinned:
            assert self.memory[page] == content
            self.pool.unpin(page)
        for table in self.tables:
            self.pool.free(table.pages)
        self.pool.check_integrity([])
        assert self.pool.num_held == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None, print_blob=True)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_pages_are_numbered_from_one() -> None:
    assert sorted(BlockPool(3).reserve(3) or []) == [1, 2, 3]


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(3)
    table = pool.reserve(2)
    assert table is not None
    assert pool.reserve(2) is None
    assert (pool.num_free, pool.num_held, pool.num_cached) == (1, 2, 0)
    pool.check_integrity([table])


def test_the_end_of_a_table_is_evicted_before_its_beginning() -> None:
    pool, hasher = BlockPool(3), PageHasher(KEY)
    table = pool.reserve(3)
    assert table is not None
    hashes = [hasher.root(None)]
    for page, content in zip(table, (5, 6, 7), strict=True):
        hashes.append(hasher.extend(hashes[-1], numbers(content)))
        pool.publish(page, hashes[-1])
    pool.free(table)
    assert pool.num_cached == 3
    assert pool.reserve(1) == [table[2]]
    assert pool.match(hashes[1:]) == table[:2]
    assert pool.reserve(1) == [table[1]]
    assert pool.match(hashes[1:]) == table[:1]


def test_what_was_found_outlives_a_long_prompt_that_comes_once() -> None:
    pool, hasher = BlockPool(16), PageHasher(KEY)

    def ask(*contents: int) -> int:
        """Pages found of a prompt."""
        hashes = [hasher.root(None)]
        for content in contents:
            hashes.append(hasher.extend(hashes[-1], numbers(content)))
        known = pool.adopt(pool.match(hashes[1:]))
        new = pool.reserve(len(contents) - len(known))
        assert new is not None
        for page, page_hash in zip(new, hashes[1 + len(known) :], strict=True):
            pool.publish(page, page_hash)
        pool.free([*known, *new])
        return len(known)

    system = (1, 2, 3, 4)
    ask(*system, 5)
    assert ask(*system, 6) == 4
    ask(*range(100, 104))
    ask(*range(200, 206))  # fills the pool
    ask(*range(300, 303))  # evicts 5, 6, and a page that was used later than the system prompt
    assert pool.num_free == 0
    assert ask(*system, 7) == 4
    ask(*range(400, 416))
    assert ask(*system, 8) == 0


def test_an_adopted_page_is_the_youngest_again() -> None:
    pool, hasher = BlockPool(2), PageHasher(KEY)
    hashes = [hasher.extend(hasher.root(None), numbers(content)) for content in (1, 2)]
    pages = []
    for page_hash in hashes:
        table = pool.reserve(1)
        assert table is not None
        pool.publish(table[0], page_hash)
        pages += table
    for page in pages:
        pool.free([page])
    pool.free(pool.adopt(pool.match(hashes[:1])))
    assert pool.reserve(1) == [pages[1]]


def test_a_second_page_of_equal_content_is_not_published() -> None:
    pool, hasher = BlockPool(2), PageHasher(KEY)
    page_hash = hasher.extend(hasher.root(None), numbers(1))
    table = pool.reserve(2)
    assert table is not None
    for page in table:
        pool.publish(page, page_hash)
    assert [is_published(pool, page) for page in table] == [True, False]
    pool.free(table)
    assert (pool.num_free, pool.num_cached) == (1, 1)


def test_a_pinned_page_is_not_handed_out() -> None:
    pool = BlockPool(2)
    table = pool.reserve(2)
    assert table is not None
    pool.pin(table[0])
    pool.free(table)
    assert pool.num_available == 1
    assert pool.reserve(2) is None
    pool.unpin(table[0])
    assert sorted(pool.reserve(2) or []) == sorted(table)


def test_a_pinned_page_that_is_not_held_can_be_taken_up_again() -> None:
    pool, hasher = BlockPool(1), PageHasher(KEY)
    page_hash = hasher.extend(hasher.root(None), numbers(1))
    table = pool.reserve(1)
    assert table is not None
    pool.publish(table[0], page_hash)
    pool.pin(table[0])
    pool.free(table)
    assert pool.num_cached == 0
    assert pool.adopt(pool.match([page_hash])) == table
    pool.unpin(table[0])
    pool.check_integrity([table])


def test_a_match_ends_at_the_first_unknown_page() -> None:
    pool, hasher = BlockPool(2), PageHasher(KEY)
    first = hasher.extend(hasher.root(None), numbers(1))
    second = hasher.extend(first, numbers(2))
    table = pool.reserve(2)
    assert table is not None
    pool.publish(table[1], second)
    assert pool.match([first, second]) == []
    assert pool.match([first, second], seen=1) == [0, table[1]], "the first page is not needed"


@pytest.mark.parametrize("seen", range(8))
def test_a_match_needs_only_the_pages_that_are_seen(seen: int) -> None:
    """The longest beginning whose last `seen` pages are known, whichever other pages are."""
    for known in itertools.product([False, True], repeat=6):
        pool, hasher = BlockPool(6), PageHasher(KEY)
        hashes, pages = [hasher.root(None)], pool.reserve(6)
        assert pages is not None
        for number, page in enumerate(pages):
            hashes.append(hasher.extend(hashes[-1], numbers(number)))
            if known[number]:
                pool.publish(page, hashes[-1])
        longest = max(end for end in range(7) if all(known[max(0, end - seen) : end]))
        expected = [page if longest - place <= seen else 0 for place, page in enumerate(pages[:longest])]
        assert pool.match(hashes[1:], seen) == expected


def test_page_0_in_a_table_has_no_owner() -> None:
    pool = BlockPool(3)
    pages = pool.reserve(2)
    assert pages is not None
    table = [0, 0, *pages]
    assert pool.fork(table) == pool.adopt(table) == table
    assert [pool.references(page) for page in (0, *pages)] == [0, 3, 3]
    assert not pool.is_shared(0)
    pool.check_integrity([table, table, table])
    for _ in range(3):
        pool.free(table)
    pool.check_integrity([[0, 0]])


def test_forgotten_pages_are_not_found() -> None:
    pool, hasher = BlockPool(2), PageHasher(KEY)
    hashes = [hasher.extend(hasher.root(None), numbers(content)) for content in (1, 2)]
    held = pool.reserve(1) or []
    cached = pool.reserve(1) or []
    for page, page_hash in zip([*held, *cached], hashes, strict=True):
        pool.publish(page, page_hash)
    pool.free(cached)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (0, 1, 1)
    pool.forget([*hashes, hasher.root("unknown")])
    assert pool.match(hashes[:1]) == pool.match(hashes[1:]) == []
    assert (pool.num_free, pool.num_cached, pool.num_held) == (1, 0, 1)
    pool.free(held)
    assert pool.num_free == 2
    pool.check_integrity([])


def test_freeing_twice_is_refused() -> None:
    pool = BlockPool(2)
    table = pool.reserve(1)
    assert table is not None
    pool.free(table)
    with pytest.raises(AssertionError, match="not referenced"):
        pool.free(table)


class TestPageHasher:
    def test_hashes_are_128_bits_and_reproducible_under_one_key(self) -> None:
        first, second = PageHasher(KEY), PageHasher(KEY)
        assert first.root(None) == second.root(None)
        assert len(first.root(None)) == 16
        assert len(first.extend(first.root(None), numbers(1, 2))) == 16

    def test_the_key_is_random(self) -> None:
        assert PageHasher().root(None) != PageHasher().root(None)

    def test_salt_predecessors_and_order_all_count(self) -> None:
        hasher = PageHasher(KEY)
        roots = [hasher.root(salt) for salt in (None, "", "a", "b", "\udc80")]
        pages = [hasher.extend(root, numbers(*tokens)) for root in roots for tokens in ((1, 2), (2, 1), (1, 3))]
        seconds = [hasher.extend(page, numbers(1, 2)) for page in pages]
        everything = [*roots, *pages, *seconds]
        assert len(set(everything)) == len(everything)

    def test_a_slice_hashes_like_a_copy(self) -> None:
        hasher = PageHasher(KEY)
        long = numbers(*range(10))
        assert hasher.extend(b"p", long[4:8]) == hasher.extend(b"p", numbers(4, 5, 6, 7))
