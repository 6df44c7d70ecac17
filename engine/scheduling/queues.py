"""Who waits for a place in a step, and whose time is limited."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from engine.scheduling.sequence import SequenceGroup, Status


class WaitingQueue:
    """Groups that wait to be admitted, in the order of service."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], SequenceGroup]] = []  # may hold finished groups
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, group: SequenceGroup) -> None:
        """A group waits from now on."""
        group.status = Status.WAITING
        heapq.heappush(self._heap, (group.key, group))
        self._count += 1

    def first(self) -> SequenceGroup | None:
        """Who is admitted next."""
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """The first one is admitted."""
        heapq.heappop(self._heap)
        self._count -= 1

    def leave(self) -> None:
        """One that waits is finished: `first` will pass it over."""
        self._count -= 1


class Deadlines:
    """When groups are to be ended."""

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
        """Those of the unfinished groups, by their ids, whose time is over; they are forgotten."""
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
