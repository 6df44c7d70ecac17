"""Pages of the KV cache: reference counts, prefix reuse, eviction.

A page is in exactly one of three states:
    held    some block table (or a pending copy) refers to it
    cached  nothing refers to it, but its hash is known, so a later prompt may take it up again
    free    neither
`free + held + cached == total` after every operation. Page 0 is not part of the pool: in tables it replaces
pages that are no longer needed, and pads them.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PageHash = bytes

# What a page is, in `BlockPool.snapshot`.
FREE, CACHED, HELD = 0, 1, 2


class PageHasher:
    """Chained 128-bit keyed hashes of full pages (BLAKE2b, RFC 7693).

    The key is random per process, so no client can make two prefixes collide; the root covers everything besides tokens
    that changes K and V (a tenant's salt).
    """

    def __init__(self, key: bytes | None = None):
        self._key = os.urandom(32) if key is None else key

    def root(self, salt: str | None) -> PageHash:
        """Hash before the first page of a sequence."""
        marker = b"\x00" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(marker, key=self._key, digest_size=16).digest()

    def extend(self, parent: PageHash, token_ids: NDArray[np.int32]) -> PageHash:
        """Hash of the page that contains token_ids and follows the page with the hash `parent`."""
        return hashlib.blake2b(parent + token_ids.tobytes(), key=self._key, digest_size=16).digest()

    def of_signal(self, parent: PageHash, signal: NDArray[np.float32]) -> PageHash:
        """Hash of input that follows parent and is not token ids."""
        digest = hashlib.blake2b(parent, key=self._key, digest_size=16)
        digest.update(np.ascontiguousarray(signal).data)
        return digest.digest()


class PoolListener(Protocol):
    """A listener that is told when the contents of pages can no longer be found."""

    def removed(self, page_hash: PageHash) -> None:
        """Record that the pool forgets this content."""

    def cleared(self) -> None:
        """Record that the pool forgets all contents."""


class BlockPool:
    """All pages and their reference counts. Only this class changes reference counts and hashes."""

    def __init__(self, num_blocks: int):
        self.total = num_blocks
        self.peak_held = 0
        self.listener: PoolListener | None = None  # notified when contents are forgotten, if it is set
        # called with a page and its hash before the page gets other content, if it is set
        self.evicted: Callable[[int, PageHash], None] | None = None
        self.num_forgotten = 0  # how often one or all contents were forgotten
        self._refs = [0] * (num_blocks + 1)
        self._pins = [0] * (num_blocks + 1)
        self._states = bytearray(num_blocks + 1)
        self._hash_of: list[PageHash | None] = [None] * (num_blocks + 1)
        self._page_of: dict[PageHash, int] = {}
        self._free = list(range(num_blocks, 0, -1))
        # Cached pages, oldest first, with the number of pages taken when they became cached: pages that no prompt has
        # found since they were written, and pages that one has.
        self._queues: tuple[OrderedDict[int, int], OrderedDict[int, int]] = OrderedDict(), OrderedDict()
        self._was_found = bytearray(num_blocks + 1)
        self._num_taken = 0

    @property
    def num_free(self) -> int:
        """Pages without content worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced pages whose content may be used again."""
        return len(self._queues[0]) + len(self._queues[1])

    @property
    def num_held(self) -> int:
        """Pages to which some table or pending copy refers."""
        return self.total - self.num_available

    @property
    def num_available(self) -> int:
        """Pages that can be reserved now."""
        return len(self._free) + self.num_cached

    def reserve(self, count: int) -> list[int] | None:
        """Take count pages with one reference each, evicting cached pages if needed (see `_evict`); if there are not
        enough, returns None and changes nothing."""
        if count > self.num_available:
            return None
        pages = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._refs[page] = 1
            self._states[page] = HELD
            pages.append(page)
        self._num_taken += count
        self.peak_held = max(self.peak_held, self.num_held)
        return pages

    def fork(self, table: Iterable[int]) -> list[int]:
        """A second table over the same pages: one more reference each."""
        pages, refs = list(table), self._refs
        for page in pages:
            if page:
                refs[page] += 1
        return pages

    def free(self, table: Sequence[int]) -> None:
        """Drop one reference of each page. The last pages of a table are evicted first, so that the beginning, which
        others are likelier to share, stays longest."""
        refs = self._refs
        for page in filter(None, reversed(table)):
            if refs[page] <= 0:
                raise AssertionError(f"page {page} is freed but not referenced")
            refs[page] -= 1
            if not refs[page]:
                self._release_if_unused(page)

    def is_shared(self, page: int) -> bool:
        """Whether another sequence holds the page, too, so that it must not be written."""
        return self._refs[page] > 1

    def references(self, page: int) -> int:
        """The number of tables that hold the page."""
        return self._refs[page]

    def pin(self, page: int) -> None:
        """Keep a page's content until `unpin`, whatever happens to its tables, because it is the source of a copy."""
        self._pins[page] += 1

    def unpin(self, page: int) -> None:
        """Undo one `pin`."""
        self._pins[page] -= 1
        self._release_if_unused(page)

    def publish(self, page: int, page_hash: PageHash) -> bool:
        """Let later prompts find a full, written page; returns whether it is the first with its content. A page whose
        content is already known stays with its current holders only."""
        if page_hash in self._page_of or self._hash_of[page] is not None:
            return False
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        return True

    def forget(self, hashes: Iterable[PageHash]) -> None:
        """Make these contents unfindable; unreferenced pages become free at once."""
        for page in [self._page_of[page_hash] for page_hash in hashes if page_hash in self._page_of]:
            if self._states[page] == CACHED:
                del self._queues[self._was_found[page]][page]
                self._free.append(page)
                self._states[page] = FREE
            self._forget(page)

    def forget_unfound(self, page_hash: PageHash) -> None:
        """Make a content unfindable unless some prompt has found it."""
        page = self._page_of.get(page_hash)
        if page is not None and not self._was_found[page]:
            self.forget([page_hash])

    def knows(self, page_hash: PageHash) -> bool:
        """Whether a page with this content can be found."""
        return page_hash in self._page_of

    def clear(self) -> bool:
        """Forget all contents; returns False and forgets nothing while pages are held."""
        if self.num_held:
            return False
        self.num_forgotten += 1
        for queue in self._queues:
            self._free.extend(reversed(queue))
            queue.clear()
        self._was_found = bytearray(self.total + 1)
        self._page_of.clear()
        self._hash_of = [None] * (self.total + 1)
        self._states = bytearray(self.total + 1)
        if self.listener is not None:
            self.listener.cleared()
        return True

    def match(self, hashes: Sequence[PageHash], seen: int | None = None) -> list[int]:
        """The longest beginning whose pages are known; takes no references (see `adopt`).

        Args:
            hashes: hashes of all pages, in order.
            seen: only the last so many pages of a beginning must be known, and those before them are given as 0;
                None: all.
        """
        end = len(hashes)
        while True:
            first = 0 if seen is None else max(end - seen, 0)
            # The page that ends this run is also missing for all shorter beginnings that extend beyond it.
            known = list(takewhile(bool, (self._page_of.get(page_hash, 0) for page_hash in hashes[first:end])))
            if first == 0 or len(known) == end - first:
                return [0] * first + known
            end = first + len(known)

    def is_known(self, page_hash: PageHash) -> bool:
        """Whether some page has this content."""
        return page_hash in self._page_of

    def page_of(self, page_hash: PageHash) -> int | None:
        return self._page_of.get(page_hash)

    def hashes(self) -> list[PageHash]:
        """The contents that can be found, in the order in which they were published. Any thread may ask."""
        return list(self._page_of)

    def adopt(self, pages: Sequence[int]) -> list[int]:
        """Take one reference of each matched page, cached or held."""
        for page in filter(None, pages):
            if self._states[page] == CACHED:
                del self._queues[self._was_found[page]][page]
                self._states[page] = HELD
            self._was_found[page] = True
            self._refs[page] += 1
        self.peak_held = max(self.peak_held, self.num_held)
        return list(pages)

    def count_cached(self, pages: Iterable[int]) -> int:
        """The number of these pages that are unreferenced, so that adopting them uses up available ones."""
        return sum(1 for page in pages if self._states[page] == CACHED)

    def snapshot(self) -> NDArray[np.uint8]:
        """[total] FREE, CACHED or HELD for each page, starting with page 1; a copy."""
        return np.frombuffer(self._states, dtype=np.uint8)[1:].copy()

    def check_integrity(self, tables: Iterable[Sequence[int]], pinned: Iterable[int] = ()) -> None:
        """Compare all state with the existing tables, and with the `pinned` pages and how often they are pinned. Raises
        AssertionError if a page is lost, held twice or counted wrongly."""
        expected = [0] * (self.total + 1)
        for table in tables:
            for page in filter(None, table):
                expected[page] += 1
        if expected != self._refs:
            wrong = [p for p in range(self.total + 1) if expected[p] != self._refs[p]]
            raise AssertionError(f"reference counts differ from the block tables for pages {wrong[:10]}")
        pins = [0] * (self.total + 1)
        for page in pinned:
            pins[page] += 1
        if pins != self._pins:
            wrong = [p for p in range(self.total + 1) if pins[p] != self._pins[p]]
            raise AssertionError(f"other pages are pinned than steps in flight copy from: {wrong[:10]}")
        held = [page for page in range(1, self.total + 1) if self._refs[page] or self._pins[page]]
        cached = [page for queue in self._queues for page in queue]
        states = sorted([*self._free, *cached, *held])
        if states != list(range(1, self.total + 1)):
            raise AssertionError("free, held and cached pages do not add up to the pool")
        for state, pages in ((FREE, self._free), (CACHED, cached)):
            if sorted(pages) != [page for page in range(1, self.total + 1) if self._states[page] == state]:
                raise AssertionError("the snapshot differs from the lists of free and cached pages")
        for page_hash, page in self._page_of.items():
            if self._hash_of[page] != page_hash:
                raise AssertionError(f"page {page} is found under a hash it does not have")
        if any(self._hash_of[page] is None for page in cached):
            raise AssertionError("a cached page has no hash")

    def _release_if_unused(self, page: int) -> None:
        if self._refs[page] or self._pins[page]:
            return
        if self._hash_of[page] is None:
            self._free.append(page)
            self._states[page] = FREE
        else:
            self._queues[self._was_found[page]][page] = self._num_taken
            self._states[page] = CACHED

    def _evict(self) -> int:
        """Forget the least recently used cached page. A page that a prompt has found counts as used later than it was:
        by as many reservations as a quarter of the pool has pages. So beginnings that many prompts share stay longer
        than prompts that occur once."""
        once, again = self._queues
        if not again or (once and next(iter(once.values())) <= next(iter(again.values())) + self.total // 4):
            page, _ = once.popitem(last=False)
        else:
            page, _ = again.popitem(last=False)
        page_hash = self._hash_of[page]
        if self.evicted is not None and page_hash is not None:
            self.evicted(page, page_hash)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        page_hash = self._hash_of[page]
        if page_hash is not None:
            self.num_forgotten += 1
            del self._page_of[page_hash]
            self._hash_of[page] = None
            self._was_found[page] = False
            if self.listener is not None:
                self.listener.removed(page_hash)
