"""Keeps pages of the prefix cache in a folder if memory has no room for them, or a process ends.

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
from typing import Protocol

import numpy as np

from engine.disk.store import Bytes, PageStore
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


class Content(Protocol):
    """Pages as bytes on the host (`engine.execution.page_content`). `size`: bytes of a page."""

    size: int

    def read(self, page: int) -> Callable[[], Bytes]:
        """Copy a page; the result waits for the copy."""

    def write(self, pages: Sequence[int], content: Bytes) -> None:
        """Fill pages [P] from content [P, size]."""


@dataclass(slots=True, kw_only=True)
class DiskCounts:
    """Counters since the start."""

    # written, read: numbers of pages
    written: int = 0
    read: int = 0
    dropped: int = 0  # evicted pages that were not written because the disk was too slow, or failed
    hits: int = 0  # number of requests for which pages were read
    errors: int = 0  # number of damaged files, and of failed reads and writes


@dataclass(slots=True)
class _Restore:
    """A request that waits for pages."""

    group: SequenceGroup
    # hashes, seen: those of the beginning to find, as for `BlockPool.match`
    hashes: list[PageHash]
    places: list[int]  # positions of the needed pages that are on the disk
    kept: int  # number of pages in memory
    seen: int | None
    placed: int = 0
    over: bool = False  # whether no more of its pages are wanted


@dataclass(slots=True)
class _Chunk:
    """Pages that were read; the last chunk of a request may have none."""

    restore: _Restore
    places: list[int] = field(default_factory=list)
    content: Bytes | None = None
    last: bool = False


class DiskTier:
    """Moves pages between a pool and a store."""

    def __init__(self, store: PageStore, content: Content, scheduler: Scheduler):
        self.counts = DiskCounts()
        self._store = store
        self._content = content  # the content of the pool's pages
        self._scheduler = scheduler  # the scheduler of the waiting requests, with its pool
        self._pool: BlockPool = scheduler.pool
        self._most = max(_MOST_WAITING // content.size, 2)  # pages
        self._wanted: deque[_Restore] = deque()
        self._waiting: deque[_Restore] = deque()  # those whose last chunk has not arrived
        self._reading_since: float | None = None  # `time.monotonic()` seconds; of a page
        self._ready: deque[_Chunk] = deque()
        self._arrived = threading.Event()  # something is ready
        self._to_read = threading.Semaphore(0)
        self._room = threading.Semaphore(self._most)  # for pages that are ready
        self._leaving: deque[tuple[PageHash, Callable[[], Bytes]]] = deque()
        self._to_write = threading.Event()
        self._offered: set[PageHash] = set()  # written during their present stay in memory, though perhaps removed
        self._flushing = threading.Lock()
        self._retry_at = 0.0
        self._reported: set[str] = set()
        self._closed = False
        self._pool.evicted = self.evicted
        scheduler.restores = self
        for name, work in (("read", _read_for), ("write", _write_for)):
            threading.Thread(target=work, args=(weakref.ref(self),), name=f"octavo-disk-{name}", daemon=True).start()
        atexit.register(_end, weakref.ref(self))

    # ---------------------------------------------------------------- the engine's thread

    def begin(self, group: SequenceGroup, hashes: Sequence[PageHash], seen: int | None) -> bool:
        """Whether a request waits from now on because pages of its prompt are on the disk and not in memory;
        `Scheduler.restored` returns it. `hashes`, `seen`: as for `BlockPool.match`."""
        store = self._store.known
        if not store or not hashes or self._hangs:
            return False
        is_known = self._pool.is_known
        start, end = longest(hashes, seen, lambda page_hash: page_hash in store or is_known(page_hash))
        places = [place for place in range(start, end) if not is_known(hashes[place])]
        if not places:
            return False
        # The pages that it needs beside those must not be evicted for them.
        self._pool.free(self._pool.adopt(self._pool.match(hashes[: places[0]], seen)))
        restore = _Restore(group, list(hashes[:end]), places, end - start - len(places), seen)
        self._waiting.append(restore)
        self._wanted.append(restore)
        self._to_read.release()
        return True

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
            room -= len(chunk.places) * self._content.size
            if chunk.content is not None:
                self._place(chunk)
                self._room.release(len(chunk.content))
            if chunk.last:
                self._waiting.popleft()  # they end in the order in which they began
                self._finish(chunk.restore)
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
        stats.disk_hits, stats.disk_bytes = counts.hits, self._store.bytes_used

    def evicted(self, page: int, page_hash: PageHash) -> None:
        """A page is about to be overwritten."""
        self._offered.discard(page_hash)
        if page_hash in self._store.known or not self._store.writable:
            return
        if len(self._leaving) >= self._most or time.monotonic() < self._retry_at:
            self.counts.dropped += 1
            return
        self._leaving.append((page_hash, self._content.read(page)))
        self._to_write.set()

    def _place(self, chunk: _Chunk) -> None:
        restore, content = chunk.restore, chunk.content
        assert content is not None
        if restore.over or restore.group.status is not Status.RESTORING:
            restore.over = True
            return
        rows = [row for row, place in enumerate(chunk.places) if not self._pool.is_known(restore.hashes[place])]
        # Pages of its beginning must not be evicted for other pages of it.
        count = min(len(rows), self._pool.num_available - restore.placed - restore.kept)
        pages = self._pool.reserve(count) if count > 0 else None
        restore.over = count < len(rows)
        if pages is None:
            return
        rows = rows[:count]
        self._content.write(pages, content[rows])
        self._scheduler.publish_restored(restore.group, [chunk.places[row] for row in rows], pages)
        self._pool.free(pages)
        restore.placed += count
        self.counts.read += count

    def _finish(self, restore: _Restore) -> None:
        if restore.placed:
            self.counts.hits += 1
            # The last pages are evicted first.
            self._pool.free(self._pool.adopt(self._pool.match(restore.hashes, restore.seen)))
        self._scheduler.restored(restore.group)

    # ---------------------------------------------------------------- the reader's thread

    def read_one(self) -> None:
        """Read the pages of the first request that waits."""
        restore = self._wanted.popleft()
        size, found = self._content.size, list[int]()
        per_chunk = max(min(_CHUNK // size, self._most // 2), 1)
        places = restore.places
        try:
            for first in range(0, len(places), per_chunk):
                wanted = places[first : first + per_chunk]
                content = np.empty((len(wanted), size), dtype=np.uint8)
                count = self._read(restore, wanted, content)
                found += wanted[:count]
                if count:
                    if not self._take_room(count, restore):
                        break
                    self._hand_over(_Chunk(restore, wanted[:count], content[:count]))
                if count < len(wanted):
                    break
        finally:  # the request waits for this
            self._hand_over(_Chunk(restore, last=True))
        self._store.touch([restore.hashes[place] for place in found])

    def _read(self, restore: _Restore, places: Sequence[int], content: Bytes) -> int:
        """Read pages up to the first one that cannot be read; returns how many."""
        damaged = self._store.damaged
        for row, place in enumerate(places):
            if restore.over or restore.group.status is not Status.RESTORING or self._closed:
                return row
            self._reading_since = time.monotonic()
            try:
                whole = self._store.read(restore.hashes[place], content[row])
            except OSError as error:
                self._report("read", error)
                return row
            finally:
                self._reading_since = None
            if not whole:
                self.counts.errors += self._store.damaged - damaged
                return row
        return len(places)

    def _take_room(self, count: int, restore: _Restore) -> bool:
        for taken in range(count):
            while not self._room.acquire(timeout=0.5):
                if self._closed or restore.over:
                    if taken:
                        self._room.release(taken)
                    return False
        return True

    def _hand_over(self, chunk: _Chunk) -> None:
        self._ready.append(chunk)
        self._arrived.set()

    # ---------------------------------------------------------------- the writer's thread

    def write_some(self) -> None:
        """Write pages that were evicted, and others while the engine is idle."""
        with self._flushing:
            self._write_leaving()
            if not self._scheduler.has_unfinished():
                self._write_resident(lambda: self._scheduler.has_unfinished() or bool(self._leaving))
        with contextlib.suppress(OSError):
            self._store.refresh()

    def flush(self, seconds: float = FLUSH_SECONDS) -> None:
        """Write all pages that are worth it, within a time limit. The engine computes nothing meanwhile."""
        end = time.monotonic() + seconds
        if self._closed or not self._flushing.acquire(timeout=seconds):
            return
        try:
            self._write_leaving(lambda: time.monotonic() > end)
            self._write_resident(lambda: time.monotonic() > end)
        finally:
            self._flushing.release()

    def close(self) -> None:
        """Write what is worth it, and stop."""
        self.flush()
        self._closed = True
        self._pool.evicted = None
        self._to_read.release()
        self._to_write.set()
        self._store.close()

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
        while self._leaving and not stop():
            page_hash, content = self._leaving[0]
            if not self._write(page_hash, content()):
                self.counts.dropped += 1
            self._leaving.popleft()  # after the store knows it

    def _write_resident(self, stop: Callable[[], bool]) -> None:
        """Write pages that memory holds, parents before their children."""
        if not self._store.writable:
            return
        pool, hashes = self._pool, self._pool.hashes()
        if len(self._offered) > 2 * pool.total:
            self._offered.intersection_update(hashes)
        for page_hash in hashes:
            if stop() or time.monotonic() < self._retry_at:
                break
            if page_hash in self._store.known or page_hash in self._offered:
                continue
            forgotten = pool.num_forgotten
            page = pool.page_of(page_hash)
            if page is None:
                continue
            content = self._content.read(page)()
            if pool.num_forgotten != forgotten:
                continue  # it may have been overwritten meanwhile
            if self._write(page_hash, content):
                self._offered.add(page_hash)

    def _write(self, page_hash: PageHash, content: Bytes) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        try:
            self.counts.written += self._store.write(page_hash, content)
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
                done, self._store.folder, cause, advice,
            )  # fmt: skip


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
