"""State slots: memory for the states of layers that carry one from token to token beside keys and values in pages.

A slot holds the states of all such layers after some token of a sequence. It is never changed: a row of a step reads
its sequence's slot and writes another one, and the first is released when the result is applied. So a failed step can
be computed again, forks share a slot, and a slot at the end of a page is a snapshot that the prefix cache keeps under
that page's hash. `BlockPool` counts slots as it counts pages; slot 0 is the state before the first token, zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.scheduling.block_pool import BlockPool, PageHash
from engine.scheduling.row import Row, RowState
from engine.scheduling.sequence import Sequence


class StateSlots:
    """The states of all sequences."""

    def __init__(self, pool: BlockPool, block_size: int, *, publishes: bool):
        self.pool = pool
        self._size = block_size  # tokens of a page; snapshots are taken at the ends of pages
        self._publishes = publishes  # whether snapshots are kept for later requests

    def take(self, row: Row, least: int) -> bool:
        """Give a planned row the slot that it writes; returns False if none is left. `least`: slots that must be left
        if the row is to write a snapshot, too."""
        sequence, slots = row.sequence, self.pool.reserve(1)
        if slots is None:
            return False
        row.state = RowState(sequence.states[-1], slots[0])
        sequence.states.append(slots[0])
        # The last page that a prompt's repetition could adopt: it leaves at least one token to compute.
        place = (row.start + row.count - 1) // self._size * self._size
        if self._publishes and row.count > 1 and place > row.start and self.pool.num_available > least:
            more = self.pool.reserve(1)
            assert more is not None
            row.state = replace(row.state, snapshot=more[0], after=place - row.start)
            sequence.snapshots += more
        return True

    def advance(self, row: Row, hash_of: Callable[[int], PageHash]) -> None:
        """A row's tokens are computed: its sequence continues from the slot that the row wrote. `hash_of`: returns the
        hash of this many of the sequence's first pages."""
        state, sequence = row.state, row.sequence
        if state is None:
            return
        if state.snapshot:
            self._publish(row, state.snapshot, hash_of((row.start + state.after) // self._size))
            self.pool.free([state.snapshot])
            sequence.snapshots.remove(state.snapshot)
        end = row.start + row.count
        if self._publishes and end % self._size == 0:
            self._publish(row, state.target, hash_of(end // self._size))
        self.pool.free([sequence.states.pop(0)])

    def _publish(self, row: Row, slot: int, page_hash: PageHash) -> None:
        """Keep a state for later requests."""
        sequence = row.sequence
        if self.pool.publish(slot, page_hash) and row.sampled and row.start >= sequence.num_prompt:
            # For an answer, the last end of a page is enough: conversations continue from there.
            if sequence.last_snapshot is not None:
                self.pool.forget_unfound(sequence.last_snapshot)
            sequence.last_snapshot = page_hash

    def reject(self, row: Row) -> None:
        """A draft of the row was wrong: its sequence continues from the slot that the row read."""
        state, sequence = row.state, row.sequence
        assert state is not None
        sequence.states.remove(state.target)
        self.pool.free([state.target])
        self._drop_snapshot(row)

    def shorten(self, row: Row) -> None:
        """A row has lost its drafts: it writes no snapshot behind its tokens."""
        if row.state is not None and row.state.after > row.count:
            self._drop_snapshot(row)
            row.state = replace(row.state, snapshot=0, after=0)

    def _drop_snapshot(self, row: Row) -> None:
        if row.state is not None and row.state.snapshot:
            row.sequence.snapshots.remove(row.state.snapshot)
            self.pool.free([row.state.snapshot])

    def match(self, hashes: list[PageHash]) -> int:
        """The maximum number of pages at the beginning after which the state is known."""
        return next((count for count in range(len(hashes), 0, -1) if self.pool.knows(hashes[count - 1])), 0)

    def adopt(self, sequence: Sequence, page_hash: PageHash) -> None:
        """Let a sequence without tokens continue from a snapshot."""
        sequence.states = self.pool.adopt(self.pool.match([page_hash]))

    def share(self, child: Sequence, parent: Sequence) -> None:
        """Let a sequence continue from its parent's state."""
        states = self.pool.fork(parent.states)
        self.release(child)
        child.states = states

    def release(self, sequence: Sequence) -> None:
        """Release a sequence's states. It starts again at its first token."""
        self.pool.free(sequence.states)
        self.pool.free(sequence.snapshots)
        sequence.states, sequence.snapshots, sequence.last_snapshot = [0], [], None

    def split(self, row: Row, count: int) -> tuple[RowState | None, RowState | None] | None:
        """The states of a row's first `count` tokens and of its others, which are computed one after the other; None if
        there is no slot for the state between them."""
        state, sequence = row.state, row.sequence
        if state is None:
            return None, None
        slots = self.pool.reserve(1)
        if slots is None:
            return None
        sequence.states.insert(sequence.states.index(state.target), slots[0])
        first, second = RowState(state.source, slots[0]), RowState(slots[0], state.target)
        if not state.snapshot:
            return first, second
        if state.after <= count:
            return replace(first, snapshot=state.snapshot, after=state.after), second
        return first, replace(second, snapshot=state.snapshot, after=state.after - count)

    def check(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError if a slot is lost or counted wrongly."""
        self.pool.check_integrity([[*sequence.states, *sequence.snapshots] for sequence in sequences])
