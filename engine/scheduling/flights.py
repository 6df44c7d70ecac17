"""Steps that are planned and not answered: one, or two where the scheduler plans one step ahead.

A step in flight has its rows, its page copies and its encoder runs. It can be planned once more as one plan per request
or as a whole, with what is known by then, if the device failed on it: that computes the same positions again, and
copies the same pages. So the sources of copies keep their content until the step is over (`BlockPool.pin`), also
if they are given up meanwhile. Everything else that a row reads is held by its sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.scheduling.batch import Row, build_plan
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.encoding import Memory
from engine.scheduling.plan import StepPlan
from engine.scheduling.sequence import Sequence, SequenceGroup
from engine.scheduling.step import Encoding


@dataclass(slots=True)
class Flight:
    """A step whose answer is not applied yet.

    Attributes:
        rows: as they were planned; some may be void by now.
        copies: pages copied for each request.
        encodings: runs of the encoder.
    """

    rows: list[Row]
    copies: dict[SequenceGroup, list[tuple[int, int]]]
    encodings: list[Encoding]

    def live(self) -> list[Row]:
        """Rows whose answer somebody waits for."""
        return [row for row in self.rows if not row.is_void]

    def memories(self, groups: set[SequenceGroup]) -> list[Memory]:
        """Encoder inputs of these requests; what none of them waits for is left out."""
        for encoding in self.encodings:
            encoding.groups = [group for group in encoding.groups if group in groups]
        self.encodings = [encoding for encoding in self.encodings if encoding.groups]
        return [encoding.memory for encoding in self.encodings]


class Flights:
    """All steps in flight, in the order in which they run."""

    def __init__(self, pool: BlockPool, block_size: int):
        self._pool = pool
        self._size = block_size
        self._queue: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._queue)

    @property
    def oldest(self) -> Flight:
        """The one that is answered next."""
        return self._queue[0]

    @property
    def newest(self) -> Flight:
        """The one that was planned last."""
        return self._queue[-1]

    def begin(self, flight: Flight) -> None:
        """A step is planned. The sources of its copies are pinned already."""
        for row in flight.rows:
            row.sequence.num_in_flight += row.count
            row.sequence.num_pending += row.sampled
        self._queue.append(flight)

    def end(self) -> Flight:
        """The oldest step is over."""
        flight = self._queue.popleft()
        for row in flight.rows:
            if not row.is_void:
                row.sequence.num_in_flight -= row.count
                row.sequence.num_pending -= row.sampled
        for group in list(flight.copies):
            self._drop_copies(flight, group)
        return flight

    def leave(self, group: SequenceGroup) -> None:
        """A request has ended or is preempted: nothing will be computed for it again."""
        for flight in self._queue:
            self._drop_copies(flight, group)

    def pending(self) -> dict[Sequence, int]:
        """The sequences that the newest step samples, each with the number of its token among all sampled ones."""
        sampled = [row for row in self.newest.rows if row.sampled]
        return {row.sequence: number for number, row in enumerate(sampled) if not row.is_void}

    def encodes(self, memory: Memory | None) -> bool:
        """A step in flight runs the encoder over an equal input."""
        return memory is not None and any(
            memory.key == encoding.memory.key for flight in self._queue for encoding in flight.encodings
        )

    def parts(self) -> dict[str, StepPlan]:
        """The oldest step as one plan per request, in the same order; each brings its own copies."""
        if not self._queue:
            return {}
        flight = self.oldest
        rows: dict[SequenceGroup, list[Row]] = {}
        for row in flight.live():
            rows.setdefault(row.group, []).append(row)
        parts = {}
        for group, own in rows.items():
            memories = [group.memory for encoding in flight.encodings if group in encoding.groups and group.memory]
            name = group.request.request_id
            parts[name] = build_plan(own, flight.copies.get(group, []), self._size, memories)
        return parts

    def remainder(self) -> StepPlan:
        """What somebody waits for still of the oldest step, without its copies and encoder runs."""
        flight = self.oldest
        flight.rows = flight.live()
        return build_plan(flight.rows, [], self._size)

    def again(self) -> StepPlan | None:
        """The whole oldest step once more, with all that is known by now; None if no request waits for it."""
        flight = self.oldest
        flight.rows = flight.live()
        if not flight.rows:
            return None
        copies = [pair for pairs in flight.copies.values() for pair in pairs]
        return build_plan(flight.rows, copies, self._size, flight.memories({row.group for row in flight.rows}))

    def plan(self, rows: list[Row]) -> StepPlan:
        """Some rows of the oldest step alone."""
        return build_plan(rows, [], self._size)

    def split(self) -> bool:
        """Make two steps of the oldest one, each answered by itself, the second after the first; False if there is
        nothing to divide. Requests are divided where half of the tokens are; one alone has half of its tokens in each.

        The copies are left to the first one, but they are all made before a split: the requests of the first may
        fail. An encoder input that requests of both have is encoded in both, for the same reason.
        """
        flight = self.oldest
        rows = flight.live()
        sizes: dict[SequenceGroup, int] = {}
        for row in rows:
            sizes[row.group] = sizes.get(row.group, 0) + row.count
        for encoding in flight.encodings:
            for group in encoding.groups:
                sizes[group] = sizes.get(group, 0) + len(encoding.memory.tokens)
        groups = list(dict.fromkeys(row.group for row in rows))
        later: list[Encoding] = []
        if len(groups) > 1:
            chosen, half = {groups[0]}, sum(sizes[group] for group in groups) / 2
            taken = sizes[groups[0]]
            for group in groups[1:-1]:
                taken += sizes[group]
                if taken > half:
                    break
                chosen.add(group)
            first = [row for row in rows if row.group in chosen]
            second = [row for row in rows if row.group not in chosen]
            later = [Encoding([group for group in one.groups if group not in chosen]) for one in flight.encodings]
            for encoding in flight.encodings:
                encoding.groups = [group for group in encoding.groups if group in chosen]
        elif any(row.count > 1 for row in rows) and not groups[0].whole:
            first = [replace(row, count=row.count // 2, sampled=False) for row in rows if row.count > 1]
            second = [replace(row, start=row.start + row.count // 2, count=-(-row.count // 2)) for row in rows]
        else:
            return False
        flight.rows = first
        flight.encodings = [encoding for encoding in flight.encodings if encoding.groups]
        self._queue.insert(1, Flight(second, {}, [encoding for encoding in later if encoding.groups]))
        return True

    def pinned(self) -> list[int]:
        """Sources of copies, as often as they are pinned."""
        return [source for flight in self._queue for pairs in flight.copies.values() for source, _ in pairs]

    def _drop_copies(self, flight: Flight, group: SequenceGroup) -> None:
        for source, _ in flight.copies.pop(group, ()):
            self._pool.unpin(source)
