"""Pages of sequences' own tokens: how many a group needs, and which of them it finds, shares, publishes and releases.

The `Scheduler` makes room for a step's tokens, because it knows what to preempt for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

from engine.scheduling.block_pool import BlockPool, PageHash, PageHasher
from engine.scheduling.limits import SchedulerConfig
from engine.scheduling.page_events import PageEvents
from engine.scheduling.row import Row
from engine.scheduling.sequence import IntBuffer, Sequence, SequenceGroup, pages_needed
from engine.scheduling.state_slots import StateSlots


@dataclass(eq=False)
class Tables:
    """Handles the tables of sequences: `BlockPool` knows pages, this class knows which tokens they hold."""

    _pool: BlockPool
    _hasher: PageHasher
    _config: SchedulerConfig
    _events: PageEvents | None = None  # notified of pages that can be found from now on; None: that is not recorded
    _states: StateSlots | None = None  # states of sequences whose layers have some

    def pages_needed(self, group: SequenceGroup) -> int:
        """The available pages that a waiting group uses up until it samples."""
        size = self._config.block_size
        hits = self._match(group)
        # Full pages before the fork point are shared; the page that contains it ends up with one sequence.
        shared = 0 if group.fork_point is None else group.fork_point // size
        pages = shared + sum(pages_needed(s.num_tokens, size) - shared for s in group.sequences) - len(hits)
        most = self._config.most_pages(len(group.sequences))  # including those of hits
        return min(pages + self._pool.count_cached(hits), most)

    def hashes(self, group: SequenceGroup) -> list[PageHash]:
        """Hashes of the full pages that a starting group may find; empty if it must compute all of them."""
        if group.request.decoding.prompt_logprobs is not None and not group.started:
            return []  # every prompt position must be computed to be scored
        pooling = group.request.pooling
        if pooling is not None and pooling.needs_all:
            return []
        if not self._config.enable_prefix_caching:
            return []
        sequence = group.sequences[0]
        known = sequence.num_tokens - 1 if group.fork_point is None else group.fork_point
        num_pages = known // self._config.block_size
        return sequence.extend_hashes(self._hasher, group.root, self._config.block_size, num_pages, group.sides)

    def publish_restored(self, group: SequenceGroup, places: Seq[int], pages: Seq[int]) -> None:
        """Let prompts find pages that hold a waiting group's tokens at these places, in ascending order."""
        sequence = group.sequences[0]
        for place, page in zip(places, pages, strict=True):
            self._pool.publish(page, sequence.hashes[place])
        if self._events is not None:
            self._events.stored(group, sequence.tokens, sequence.hashes, places)

    def num_missing(self, group: SequenceGroup) -> int:
        """Tokens that a waiting group of one sequence has to compute."""
        return group.sequences[0].num_tokens - len(self._match(group)) * self._config.block_size

    def adopt(self, group: SequenceGroup) -> None:
        """Give a starting group the pages of the longest known beginning."""
        sequence, hits = group.sequences[0], self._match(group)
        sequence.table.extend(self._pool.adopt(hits))
        sequence.num_published = group.num_found = len(hits)
        sequence.num_computed = len(hits) * self._config.block_size
        if self._states is not None and hits:
            self._states.adopt(sequence, sequence.hashes[len(hits) - 1])
        self.fork_from_first(group)

    def fork_from_first(self, group: SequenceGroup) -> None:
        """Let all other sequences continue from the first one's pages, once the common prefix is computed."""
        first = group.sequences[0]
        if group.fork_point != first.num_computed:
            return
        for sequence in group.sequences[1:]:
            self.share(sequence, first)
            sequence.num_computed = first.num_computed
            sequence.num_published = first.num_published
        group.fork_point = None

    def share(self, child: Sequence, parent: Sequence) -> None:
        """Give a sequence its parent's pages instead of its own. If it has its own page for the next tokens, it keeps
        that page, and the parent's page will be copied there."""
        child.num_writable = 0
        if self._states is not None:
            self._states.share(child, parent)
        end = child.table.size
        if end != parent.table.size:
            self._pool.free(child.table.tolist())
            child.table = IntBuffer(self._pool.fork(parent.table))
            parent.num_writable = 0
            return
        own, wanted = child.table.view(), parent.table.view()
        page = child.num_computed // self._config.block_size
        if page < end and own.item(page) != wanted.item(page) and not self._pool.is_shared(own.item(page)):
            child.source, end = wanted.item(page), page
        else:
            parent.num_writable = 0
        first = end
        while first and own.item(first - 1) != wanted.item(first - 1):  # before equal pages, all are equal
            first -= 1
        pages = self._pool.fork(wanted[first:end].tolist())
        self._pool.free(own[first:end].tolist())
        own[first:end] = pages

    def missing(self, sequence: Sequence, end: int) -> tuple[int, bool]:
        """The number of pages that a sequence lacks to write its tokens up to `end`. Also whether one of these must
        replace a shared page: the page that the sequence writes first, if others hold it too."""
        page, held = sequence.num_scheduled // self._config.block_size, sequence.table.size
        shared = page < held and self._pool.is_shared(sequence.table[page])
        return max(pages_needed(end, self._config.block_size) - held, 0) + shared, shared

    def take(self, sequence: Sequence, pages: list[int], shared: bool) -> tuple[int, int] | None:
        """Give a sequence the pages that it lacked (see `missing`); returns which page to copy where before the step
        writes, if any. Its source is pinned."""
        place, copy = sequence.num_scheduled // self._config.block_size, None
        if shared:
            source, target = sequence.table[place], pages.pop()
            sequence.table[place] = target
            self._pool.pin(source)
            self._pool.free([source])
            copy = source, target
        elif sequence.source:
            self._pool.pin(sequence.source)
            copy = sequence.source, sequence.table[place]
        if pages:
            sequence.table.extend(pages)
        sequence.source, sequence.num_writable = 0, sequence.table.size * self._config.block_size
        return copy

    def go_on(
        self, beams: Seq[Sequence], parents: Mapping[Sequence, Sequence], pages: Seq[int]
    ) -> list[tuple[int, int]]:
        """Give beams, which have their parents' pages, those that a step in flight writes for them; returns which page
        it copies where before that. The sources are pinned.

        Args:
            parents: the parents of those that were forked.
            pages: the pages set aside for each beam (`Searches`); unused ones are returned.
        """
        size, copies, unused = self._config.block_size, [], []
        for beam, page in zip(beams, pages, strict=True):
            place = beam.num_computed // size
            if beam.num_computed % size == 0:
                beam.table.append(page)
            elif beam in parents:
                source = parents[beam].table[place]
                self._pool.pin(source)
                self._pool.free([beam.table[place]])
                beam.table[place] = page
                copies.append((source, page))
            else:
                unused.append(page)
            beam.source, beam.num_writable = 0, beam.table.size * size
        self._pool.free(unused)
        return copies

    def advance(self, rows: Iterable[Row]) -> None:
        """The rows' tokens are computed: publish full pages, and release pages that no later query sees."""
        size, has_pages = self._config.block_size, self._config.needs.paged
        publishes = has_pages and self._config.enable_prefix_caching
        has_window = has_pages and self._config.window is not None
        for row in rows:
            sequence = row.sequence
            sequence.num_computed += row.count
            if self._states is not None:
                self._states.advance(row, partial(self._hash, row.group, sequence))
            if publishes and sequence.num_computed >= (sequence.num_published + 1) * size:
                self._publish(row.group, sequence)
            if has_window:
                self._leave_window(sequence, row.start)

    def truncate(self, sequence: Sequence) -> None:
        """Release pages that were to hold more tokens than the sequence has: those of drafts that were wrong."""
        size, kept = self._config.block_size, pages_needed(sequence.num_tokens, self._config.block_size)
        if kept < sequence.table.size:
            self._pool.free(sequence.table.view(kept).tolist())
            sequence.table.shorten(kept)
            sequence.num_writable = min(sequence.num_writable, kept * size)

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's pages. The results of its rows in flight are dropped. The pages are free at once,
        although a step in flight may still write them. This is safe because steps run in the order in which they were
        launched: a later step writes its own content after that, and reads only content that it, or a step after the
        release, has written."""
        self._pool.free(sequence.table.tolist())
        if self._states is not None:
            self._states.release(sequence)
        sequence.table = IntBuffer()
        sequence.num_computed = sequence.num_published = sequence.num_writable = sequence.source = 0
        sequence.void()

    def check(self, groups: Iterable[SequenceGroup]) -> None:
        """Raise AssertionError if a table lacks a page that is seen, contains one that is not, or others hold what a
        sequence seems to write alone."""
        for sequence in (s for group in groups for s in group.sequences if len(s.table)):
            table, first = sequence.table.view(), self._config.first_page(sequence.num_computed)
            if table[:first].any() or not table[first:].all():
                raise AssertionError(f"pages from {first} on are needed in the table {table.tolist()}")
            written = table[sequence.num_scheduled // self._config.block_size :].tolist()
            if sequence.num_writable and any(map(self._pool.is_shared, written)):
                raise AssertionError(f"one sequence writes the pages {written}, but others hold some of them, too")

    def _match(self, group: SequenceGroup) -> list[int]:
        hashes = self.hashes(group)
        found = self._pool.match(hashes, self._config.seen_pages)
        while self._states is not None and found and (count := self._states.match(hashes[: len(found)])) < len(found):
            found = self._pool.match(hashes[:count], self._config.seen_pages)
        return found

    def _hash(self, group: SequenceGroup, sequence: Sequence, num_pages: int) -> PageHash:
        """The hash of a sequence's first pages."""
        return sequence.extend_hashes(self._hasher, group.root, self._config.block_size, num_pages, group.sides)[-1]

    def _leave_window(self, sequence: Sequence, position: int) -> None:
        """Release what a query at `position` saw and the next one does not see."""
        # Page 0 replaces released pages, so that positions stay.
        start, end = self._config.first_page(position), self._config.first_page(sequence.num_computed)
        if start < end:
            pages = sequence.table.view(start, end)
            self._pool.free(pages.tolist())
            pages[:] = 0

    def _publish(self, group: SequenceGroup, sequence: Sequence) -> None:
        full = sequence.num_computed // self._config.block_size
        hashes = sequence.extend_hashes(self._hasher, group.root, self._config.block_size, full, group.sides)
        table, publish = sequence.table, self._pool.publish
        new = [page for page in range(sequence.num_published, full) if publish(table[page], hashes[page])]
        if new and self._events is not None:
            self._events.stored(group, sequence.tokens, hashes, new)
        sequence.num_published = full
