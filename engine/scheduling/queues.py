"""Requests that wait for a place in a step, and requests with a deadline."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.scheduling.sequence import SequenceGroup, Status

_Name = tuple[str | None, bool, bool]  # a tenant, and whether its background requests and pooling inputs are meant

_SPARE = 16  # finished groups that a line may hold, besides as many as wait


class WaitingQueue:
    """Groups that wait to be admitted: tenants take turns, and each tenant's groups are ordered by priority and
    arrival.

    A tenant keeps its turn until its first group is admitted. A tenant that begins to wait comes last, so each other
    tenant passes it at most once. If a group was admitted and preempted, its tenant gets the turn back. Tenants without
    a waiting group leave no trace.

    A tenant's pooling inputs have a separate line and separate turns. So do its background requests, whose turns come
    when no other group waits. `lacks_room`: whether rows or pages were missing for the first in line, other than a
    background request, when it was last examined.
    """

    def __init__(self) -> None:
        self.lacks_room = False
        self._lines: OrderedDict[_Name, _Line] = OrderedDict()  # in the order of their turns
        self._count = 0
        self.num_background = 0  # number of groups that are background requests

    @property
    def has_clients(self) -> bool:
        """Whether a group waits that is not a background request."""
        return self._count > self.num_background

    def __len__(self) -> int:
        return self._count

    def push(self, group: SequenceGroup) -> None:
        """Let a group wait from now on."""
        group.status = Status.WAITING
        line = self._lines.setdefault(_line_of(group), _Line())
        heapq.heappush(line.heap, (group.request.priority, group.arrival, group))
        line.num_waiting += 1
        self._count += 1
        self.num_background += group.is_background

    def push_back(self, group: SequenceGroup) -> None:
        """Let an admitted group wait again: it is its tenant's turn."""
        self.push(group)
        self._lines.move_to_end(_line_of(group), last=False)
        self.lacks_room = self.lacks_room or not group.is_background

    def first(self, pooled: bool = True) -> SequenceGroup | None:
        """The group that is admitted next. `pooled`: whether it may be a pooling input."""
        found: _Line | None = None
        for (_, is_background, is_pooled), line in self._lines.items():
            if is_pooled and not pooled:
                continue
            if not is_background:
                return line.first()
            found = found or line
        return None if found is None else found.first()

    def pop(self, group: SequenceGroup) -> None:
        """Admit a group, its tenant's first."""
        name = _line_of(group)
        if self._lines[name].first() is not group:
            raise AssertionError("a group is admitted before its tenant's first")
        heapq.heappop(self._lines[name].heap)
        self._lines.move_to_end(name)
        self.leave(group)

    def leave(self, group: SequenceGroup) -> None:
        """A waiting group has ended, or is admitted."""
        line = self._lines[_line_of(group)]
        line.num_waiting -= 1
        self._count -= 1
        self.num_background -= group.is_background
        self.lacks_room = self.lacks_room and self.has_clients
        if not line.num_waiting:
            del self._lines[_line_of(group)]
        elif len(line.heap) > 2 * line.num_waiting + _SPARE:
            line.heap = [entry for entry in line.heap if entry[2].status is Status.WAITING and entry[2] is not group]
            heapq.heapify(line.heap)


def _line_of(group: SequenceGroup) -> _Name:
    return group.request.tenant, group.is_background, group.request.pooling is not None


@dataclass(slots=True)
class _Line:
    """Waiting groups of one tenant, `num_waiting` of them. `heap`: priority, arrival and group; may hold a bounded
    number of finished groups."""

    heap: list[tuple[int, int, SequenceGroup]] = field(default_factory=list)
    num_waiting: int = 0

    def first(self) -> SequenceGroup:
        """The next to be admitted."""
        while self.heap[0][2].status is Status.FINISHED:
            heapq.heappop(self.heap)
        return self.heap[0][2]


class Deadlines:
    """The deadlines of groups."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []  # may name finished requests

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, group: SequenceGroup) -> None:
        """Remember a group's deadline, if it has one."""
        request = group.request
        if request.deadline is not None:
            heapq.heappush(self._heap, (request.deadline, group.arrival, request.request_id))

    def due(self, now: float, groups: Mapping[str, SequenceGroup]) -> list[SequenceGroup]:
        """The unfinished groups, by their ids, whose time is over; they are forgotten."""
        late = []
        while self._heap:
            deadline, arrival, request_id = self._heap[0]
            group = groups.get(request_id)
            if group is not None and group.arrival == arrival:
                if deadline > now:
                    break
                late.append(group)
            heapq.heappop(self._heap)
        return late
