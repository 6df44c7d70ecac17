"""Keeps pages and state snapshots of the prefix cache in a folder if memory has no room for them, or a process ends.

Out: a page is written when it is evicted, when the engine has been idle for a moment, and when the engine ends. In: a
request whose prompt begins like pages in the folder waits while a thread reads them; other requests continue.

Threads: the engine's thread calls `begin`, `turn` and `evicted`, and never waits for the disk. Two threads
read and write files. While the engine is idle, the writer copies pages that no request holds: a copy counts only if the
pool has forgotten no page meanwhile, and a page is written again only after the pool has forgotten it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from engine.disk.store import Bytes, PageStore
from engine.errors import EngineDeadError
from engine.execution.page_content import Content
from engine.interface.outputs import EngineStats
from engine.scheduling.block_pool import BlockPool, PageHash
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SequenceGroup, Status

logger = logging.getLogger("octavo.disk")

FLUSH_SECONDS = 10.0  # the longest time that an engine's end waits for the disk
_IDLE_SECONDS = 0.5  # between checks of whether the engine is idle
_RETRY_SECONDS = 60.0  # without a write after the disk has failed
_MOST_WAITING = 128 * 2**20  # bytes of evicted pages that wait to be written, and of read pages that wait to be used
_CHUNK = 8 * 2**20  # bytes that are read before they are handed on
_HANGING = 5.0  # seconds that a page may take, after which requests are computed instead
_PATIENCE = 0.02  # seconds that the engine waits for pages before it looks at new requests
_TURN = 16 * 2**20  # bytes that are copied into pages between two steps of other requests


class Shelf:
    """A store of one kind of content: pages, or state slots, which count as pages here.

    Attributes:
        most: number of evicted pages that may wait to be written.
        leaving: evicted pages that wait to be written.
        room: for read pages that wait to be used.
        offered: hashes of pages that were written during their present stay in memory, though perhaps removed.
    """

    def __init__(self, store: PageStore, content: Content, pool: BlockPool):
        self.store, self.content, self.pool = store, content, pool
        self.most = max(_MOST_WAITING // content.size, 2)
        self.room = threading.Semaphore(self.most)
        self.leaving: deque[tuple[PageHash, Callable[[], Bytes]]] = deque()
        self.offered: set[PageHash] = set()

    def knows(self, page_hash: PageHash) -> bool:
        """Whether a page with this content is in memory or in the folder."""
        return page_hash in self.store.known or self.pool.is_known(page_hash)


@dataclass(slots=True, kw_only=True)
class DiskCounts:
    """Counters since the start."""

    # written, read: numbers of pages and states
    written: int = 0
    read: int = 0
    dropped: int = 0  # evicted pages that were not written because the disk was too slow, or failed
    hits: int = 0  # number of requests for which pages were read
    errors: int = 0  # number of damaged files, and of failed reads and writes


@dataclass(slots=True)
class _Need:
    """Pages of one kind that a request needs."""

    shelf: Shelf
    # hashes, seen: those of the beginning to find, as for `BlockPool.match`
    hashes: list[PageHash]
    seen: int | None
    places: list[int]  # positions of the needed pages that are on the disk
    kept: int  # number of pages in memory
    publish: Callable[[list[int], list[int]], None]  # called with places and the pages that hold their content now
    placed: int = 0

    def hold(self, end: int) -> None:
        """Mark what memory has of the first `end` pages as used now: the last ones are evicted first."""
        pool = self.shelf.pool
        pool.free(pool.adopt(pool.match(self.hashes[:end], self.seen)))


@dataclass(slots=True)
class _Restore:
    """A request that waits for pages."""

    group: SequenceGroup
    needs: list[_Need]  # without the pages of one, those of the next ones are useless
    over: bool = False  # whether no more of its pages are wanted


@dataclass(slots=True)
class _Chunk:
    """Pages that were read; the last chunk of a request has none."""

    restore: _Restore
    need: _Need | None = None
    places: list[int] = field(default_factory=list)
    content: Bytes | None = None


class DiskTier:
    """Moves pages between a pool and a store."""

    def __init__(self, opened: Sequence[tuple[PageStore, Content]], scheduler: Scheduler):
        """`opened`: the stores of pages and, for a model whose layers carry a state, of states, each with access to the
        content in memory."""
        self.counts = DiskCounts()
        self._scheduler = scheduler  # the scheduler of the waiting requests, with its pools
        pools = [scheduler.pool, *([] if scheduler.states is None else [scheduler.states.pool])]
        self._shelves = [Shelf(*one, pool) for one, pool in zip(opened, pools, strict=True)]
        self._pages = self._shelves[0]
        self._states = self._shelves[1] if len(self._shelves) > 1 else None
        self._wanted: deque[_Restore] = deque()
        self._waiting: deque[_Restore] = deque()  # those whose last chunk has not arrived
        self._reading_since: float | None = None  # `time.monotonic()` seconds; of a page
        self._ready: deque[_Chunk] = deque()
        self._arrived = threading.Event()  # something is ready
        self._to_read = threading.Semaphore(0)
        self._to_write = threading.Event()
        self._flushing = threading.Lock()
        self._retry_at = 0.0
        self._reported: set[str] = set()
        self._closed = False
        for shelf in self._shelves:
            shelf.pool.evicted = partial(self.evicted, shelf)
        scheduler.restores = self
        for name, work in (("read", _read_for), ("write", _write_for)):
            threading.Thread(target=work, args=(weakref.ref(self),), name=f"octavo-disk-{name}", daemon=True).start()
        atexit.register(_end, weakref.ref(self))

    # ---------------------------------------------------------------- the engine's thread

    def begin(self, group: SequenceGroup, hashes: Sequence[PageHash], seen: int | None) -> bool:
        """Whether a request waits from now on because pages of its prompt, of its encoder's input, or the state after
        them are on the disk and not in memory; `Scheduler.restored` returns it. `hashes`, `seen`: as for
        `BlockPool.match`."""
        if self._hangs or not any(shelf.store.known for shelf in self._shelves):
            return False
        needs = self._needs(group, hashes, seen)
        if not any(need.places for need in needs):
            return False
        for need in needs:  # the pages that it needs beside those must not be evicted for them
            need.hold(need.places[0] if need.places else len(need.hashes))
        restore = _Restore(group, needs)
        self._waiting.append(restore)
        self._wanted.append(restore)
        self._to_read.release()
        return True

    def _needs(self, group: SequenceGroup, hashes: Sequence[PageHash], seen: int | None) -> list[_Need]:
        """The content that spares a request most of its work; empty if its encoder must run again."""
        pages, needs = self._pages, []
        if group.encoder_input is not None:
            encoded = group.encoder_input.hashes
            if not all(map(pages.knows, encoded)):
                return []
            needs.append(_need(pages, encoded, range(len(encoded))))
        start, end = longest(hashes, seen, pages.knows)
        if self._states is not None:
            while end and (count := last_known(hashes[:end], self._states.knows)) < end:
                start, end = longest(hashes[:count], seen, pages.knows)
            if end:
                needs.append(_need(self._states, hashes[end - 1 : end], range(1)))
        own = _need(pages, hashes[:end], range(start, end), seen)
        own.publish = partial(self._scheduler.publish_restored, group)
        return [*needs, own]

    def turn(self) -> None:
        """Copy read pages into the cache: only a part of them if something else is to be computed; else wait for
        some."""
        alone, room = self._scheduler.only_restores, _TURN
        if alone:
            self._arrived.wait(_PATIENCE)
        elif not self._waiting:
            return
        if self._hangs:
            for restore in self._waiting:
                restore.over = True
                self._scheduler.restored(restore.group)
        while self._ready and (alone or room > 0):
            chunk = self._ready.popleft()
            if chunk.need is None:
                self._waiting.popleft()  # they end in the order in which they began
                self._finish(chunk.restore)
                continue
            shelf = chunk.need.shelf
            room -= len(chunk.places) * shelf.content.size
            self._place(chunk, chunk.need)
            shelf.room.release(len(chunk.places))
        if not self._ready:
            self._arrived.clear()
            if self._ready:
                self._arrived.set()

    @property
    def _hangs(self) -> bool:
        since = self._reading_since
        return since is not None and time.monotonic() - since > _HANGING

    def count(self, stats: EngineStats) -> None:
        """Copy the counters into an engine's statistics."""
        counts = self.counts
        stats.disk_pages_written, stats.disk_pages_read = counts.written, counts.read
        stats.disk_pages_dropped, stats.disk_errors = counts.dropped, counts.errors
        stats.disk_hits, stats.disk_bytes = counts.hits, max(shelf.store.bytes_used for shelf in self._shelves)

    def evicted(self, shelf: Shelf, page: int, page_hash: PageHash) -> None:
        """A page is about to be overwritten."""
        shelf.offered.discard(page_hash)
        if page_hash in shelf.store.known or not shelf.store.writable:
            return
        if len(shelf.leaving) >= shelf.most or time.monotonic() < self._retry_at:
            self.counts.dropped += 1
            return
        shelf.leaving.append((page_hash, shelf.content.read(page)))
        self._to_write.set()

    def _place(self, chunk: _Chunk, need: _Need) -> None:
        restore, content, pool = chunk.restore, chunk.content, need.shelf.pool
        assert content is not None
        if restore.over or restore.group.status is not Status.RESTORING:
            restore.over = True
            return
        rows = [row for row, place in enumerate(chunk.places) if not pool.is_known(need.hashes[place])]
        # Pages of its beginning must not be evicted for other pages of it.
        held = sum(other.placed + other.kept for other in restore.needs if other.shelf is need.shelf)
        count = min(len(rows), pool.num_available - held)
        pages = pool.reserve(count) if count > 0 else None
        restore.over = count < len(rows)
        if pages is None:
            return
        rows = rows[:count]
        need.shelf.content.write(pages, content[rows])
        need.publish([chunk.places[row] for row in rows], pages)
        pool.free(pages)
        need.placed += count
        self.counts.read += count

    def _finish(self, restore: _Restore) -> None:
        if any(need.placed for need in restore.needs):
            self.counts.hits += 1
            for need in restore.needs:
                need.hold(len(need.hashes))
        self._scheduler.restored(restore.group)

    # ---------------------------------------------------------------- the reader's thread

    def read_one(self) -> None:
        """Read the pages of the first request that waits."""
        restore = self._wanted.popleft()
        try:
            for need in restore.needs:
                if self._read_need(restore, need) < len(need.places):
                    break
        finally:  # the request waits for this
            self._hand_over(_Chunk(restore))

    def _read_need(self, restore: _Restore, need: _Need) -> int:
        """Read pages of one kind up to the first one that cannot be read; returns how many."""
        shelf, found = need.shelf, 0
        size = shelf.content.size
        per_chunk = max(min(_CHUNK // size, shelf.most // 2), 1)
        for first in range(0, len(need.places), per_chunk):
            wanted = need.places[first : first + per_chunk]
            content = np.empty((len(wanted), size), dtype=np.uint8)
            count = self._read(restore, need, wanted, content)
            if count and not self._take_room(count, shelf, restore):
                break
            found += count
            if count:
                self._hand_over(_Chunk(restore, need, wanted[:count], content[:count]))
            if count < len(wanted):
                break
        shelf.store.touch([need.hashes[place] for place in need.places[:found]])
        return found

    def _read(self, restore: _Restore, need: _Need, places: Sequence[int], content: Bytes) -> int:
        """Read pages up to the first one that cannot be read; returns how many."""
        store = need.shelf.store
        damaged = store.damaged
        for row, place in enumerate(places):
            if restore.over or restore.group.status is not Status.RESTORING or self._closed:
                return row
            self._reading_since = time.monotonic()
            try:
                whole = store.read(need.hashes[place], content[row])
            except OSError as error:
                self._report("read", error)
                return row
            finally:
                self._reading_since = None
            if not whole:
                self.counts.errors += store.damaged - damaged
                return row
        return len(places)

    def _take_room(self, count: int, shelf: Shelf, restore: _Restore) -> bool:
        for taken in range(count):
            while not shelf.room.acquire(timeout=0.5):
                if self._closed or restore.over:
                    if taken:
                        shelf.room.release(taken)
                    return False
        return True

    def _hand_over(self, chunk: _Chunk) -> None:
        self._ready.append(chunk)
        self._arrived.set()

    # ---------------------------------------------------------------- the writer's thread

    def write_some(self) -> None:
        """Write pages that were evicted, and others while the engine is idle."""
        with self._flushing, contextlib.suppress(EngineDeadError):  # a runner's process has ended, with its pages
            self._write_leaving()
            if not self._scheduler.has_unfinished():
                self._write_resident(self._is_busy)
        with contextlib.suppress(OSError):
            for shelf in self._shelves:
                shelf.store.refresh()

    def _is_busy(self) -> bool:
        return self._closed or self._scheduler.has_unfinished() or any(shelf.leaving for shelf in self._shelves)

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Write all pages that are worth it, within a time limit. The engine computes nothing meanwhile."""
        end = time.monotonic() + seconds
        if self._closed or not self._flushing.acquire(timeout=seconds):
            return
        try:
            with contextlib.suppress(EngineDeadError):
                self._write_leaving(lambda: time.monotonic() > end)
                self._write_resident(lambda: time.monotonic() > end)
        finally:
            self._flushing.release()

    def close(self) -> None:
        """Write pages that are worth keeping, and stop."""
        self.flush()
        self._closed = True
        self._to_read.release()
        self._to_write.set()
        for shelf in self._shelves:
            shelf.pool.evicted = None
            shelf.store.close()

    @property
    def is_closed(self) -> bool:
        """Whether the threads should end."""
        return self._closed

    def await_reading(self) -> bool:
        """Wait for a request that needs pages; returns False if none came."""
        return self._to_read.acquire(timeout=_IDLE_SECONDS) and bool(self._wanted)

    def await_writing(self) -> None:
        """Wait for pages to write, or until it is time to check whether the engine is idle."""
        self._to_write.wait(_IDLE_SECONDS)
        self._to_write.clear()

    def _write_leaving(self, stop: Callable[[], bool] = lambda: False) -> None:
        for shelf in self._shelves:
            while shelf.leaving and not stop():
                page_hash, content = shelf.leaving[0]
                written = False
                try:
                    written = self._write(shelf, page_hash, content())
                finally:
                    self.counts.dropped += not written
                    shelf.leaving.popleft()  # after the store knows it

    def _write_resident(self, stop: Callable[[], bool]) -> None:
        """Write what memory holds, parents before their children."""
        for shelf in self._shelves:
            if shelf.store.writable:
                self._write_shelf(shelf, stop)

    def _write_shelf(self, shelf: Shelf, stop: Callable[[], bool]) -> None:
        pool, hashes, offered = shelf.pool, shelf.pool.hashes(), shelf.offered
        if len(offered) > 2 * pool.total:
            offered.intersection_update(hashes)
        for page_hash in hashes:
            if stop() or time.monotonic() < self._retry_at:
                break
            if page_hash in shelf.store.known or page_hash in offered:
                continue
            forgotten = pool.num_forgotten
            page = pool.page_of(page_hash)
            if page is None:
                continue
            content = shelf.content.read(page)()
            if pool.num_forgotten != forgotten:
                continue  # it may have been overwritten meanwhile
            if self._write(shelf, page_hash, content):
                offered.add(page_hash)

    def _write(self, shelf: Shelf, page_hash: PageHash, content: Bytes) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        try:
            self.counts.written += shelf.store.write(page_hash, content)
        except OSError as error:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            self._report("written", error)
            return False
        return True

    def _report(self, done: str, error: OSError) -> None:
        self.counts.errors += 1
        if done not in self._reported:
            self._reported.add(done)
            cause = os.strerror(error.errno) if error.errno else str(error)
            advice = " Free some space, or lower --kv-disk-size." if error.errno == errno.ENOSPC else ""
            logger.warning(
                "Pages cannot be %s in %s: %s. Requests continue without them.%s This is reported once.",
                done, self._pages.store.folder, cause, advice,
            )  # fmt: skip


def _need(shelf: Shelf, hashes: Sequence[PageHash], wanted: range, seen: int | None = None) -> _Need:
    """The wanted places of these pages."""
    places = [place for place in wanted if not shelf.pool.is_known(hashes[place])]

    def publish(places: list[int], pages: list[int]) -> None:
        for place, page in zip(places, pages, strict=True):
            shelf.pool.publish(page, hashes[place])

    return _Need(shelf, list(hashes), seen, places, len(wanted) - len(places), publish)


def last_known(hashes: Sequence[PageHash], is_known: Callable[[PageHash], bool]) -> int:
    """The largest number of first pages of which the last is known; 0 if none is."""
    return next((count for count in range(len(hashes), 0, -1) if is_known(hashes[count - 1])), 0)


def longest(hashes: Sequence[PageHash], seen: int | None, is_known: Callable[[PageHash], bool]) -> tuple[int, int]:
    """The first and the last place, exclusive, of the pages that the longest known beginning needs. See
    `BlockPool.match`."""
    end = len(hashes)
    while True:
        first = 0 if seen is None else max(end - seen, 0)
        stop = next((place for place in range(first, end) if not is_known(hashes[place])), end)
        if first == 0 or stop == end:
            return first, stop
        end = stop


def _read_for(found: weakref.ref[DiskTier]) -> None:
    _work(found, lambda tier: tier.read_one() if tier.await_reading() else None)


def _write_for(found: weakref.ref[DiskTier]) -> None:
    def work(tier: DiskTier) -> None:
        tier.await_writing()
        if not tier.is_closed:
            tier.write_some()

    _work(found, work)


def _work(found: weakref.ref[DiskTier], work: Callable[[DiskTier], None]) -> None:
    """Run a tier's thread until it is closed or gone."""
    while (tier := found()) is not None and not tier.is_closed:
        try:
            work(tier)
        except Exception:  # a bug of ours; without this thread, waiting requests would wait forever
            logger.exception("a page could not be moved between memory and the disk")
        del tier


def _end(found: weakref.ref[DiskTier]) -> None:
    if (tier := found()) is not None:
        tier.close()
