"""Replicas behind a router, and what requests felt."""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from fleets.replica import Replica, Request, Service

ROUTINGS = ("random", "least", "prefix")
WARM = 0.25  # part of a simulation that fills the caches and is not counted


@dataclass
class Fleet:
    """Replicas behind a router that knows at once what they do.

    Attributes:
        ended: requests that were answered, in that order.
    """

    service: Service
    size: int
    routing: str
    seed: int = 0
    ended: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._where: defaultdict[int, set[int]] = defaultdict(set)  # replicas that have a block
        self.replicas = [
            Replica(self.service, self._forget(number), self._remember(number)) for number in range(self.size)
        ]
        self._rng = random.Random(self.seed)
        self._unfinished = np.zeros(self.size)
        self._pending = np.zeros(self.size)
        self._events: list[tuple[float, int, int]] = []
        self._versions = [0] * self.size

    def run(self, requests: Iterable[Request]) -> None:
        """Serve requests, which are in order of arrival, until all are answered."""
        for request in requests:
            self._pass(request.arrival)
            number = self._route(request)
            self._advance(number, request.arrival)
            self.replicas[number].add(request)
            self._renew(number)
        self._pass(math.inf)

    def _pass(self, until: float) -> None:
        while self._events and self._events[0][0] <= until and self._events[0][0] < math.inf:
            moment, number, version = heapq.heappop(self._events)
            if version == self._versions[number]:
                self._advance(number, moment)
                self._renew(number)

    def _advance(self, number: int, moment: float) -> None:
        self.ended.extend(self.replicas[number].advance(moment))

    def _renew(self, number: int) -> None:
        replica = self.replicas[number]
        self._versions[number] += 1
        heapq.heappush(self._events, (replica.next_event(), number, self._versions[number]))
        self._unfinished[number] = replica.unfinished
        self._pending[number] = replica.pending

    def _route(self, request: Request) -> int:
        if self.routing == "random":
            return self._rng.randrange(self.size)
        if self.routing == "least":
            fewest = np.flatnonzero(self._unfinished == self._unfinished.min())
            return int(fewest[self._rng.randrange(len(fewest))])
        # All that have nothing of the prompt differ by what waits for them alone.
        work = self._pending + self._unfinished * self.service.step
        fewest = np.flatnonzero(work == work.min())
        best = int(fewest[self._rng.randrange(len(fewest))])
        whole = self.service.prompt(0, request.tokens)
        least = work[best] + whole - self.service.prompt(0, self.replicas[best].known(request))
        for number in self._holders(request):
            missing = whole - self.service.prompt(0, self.replicas[number].known(request))
            if work[number] + missing < least:
                best, least = number, work[number] + missing
        return best

    def _holders(self, request: Request) -> set[int]:
        """Some replicas that have a beginning of the prompt: of those with the most of it, 32 at most. What half of the
        fleet has tells none from the others."""
        found: set[int] = set()
        for block in reversed(request.blocks):
            holders = self._where.get(block, ())
            if 2 * len(holders) > self.size:
                break
            found.update(heapq.nsmallest(32 - len(found), holders, key=self._pending.__getitem__))
            if len(found) >= 32:
                break
        return found

    def _remember(self, number: int) -> Callable[[int], None]:
        return lambda block: self._where[block].add(number)

    def _forget(self, number: int) -> Callable[[int], None]:
        return lambda block: self._where[block].discard(number)


def report(fleet: Fleet) -> dict[str, float]:
    """Latencies of the requests that came once the caches were warm, and the load of the replicas."""
    by_arrival = sorted(fleet.ended, key=lambda request: request.arrival)
    counted = by_arrival[int(WARM * len(by_arrival)) :]
    first = np.array([request.first - request.arrival for request in counted])
    each = [(request.end - request.first) / (request.output - 1) for request in counted if request.output > 1]
    span = by_arrival[-1].arrival - by_arrival[0].arrival
    return {
        "requests": len(by_arrival),
        "rate_per_replica": round(len(by_arrival) / span / fleet.size, 4),
        "first_token_p50": round(float(np.percentile(first, 50)), 3),
        "first_token_p95": round(float(np.percentile(first, 95)), 3),
        "first_token_p99": round(float(np.percentile(first, 99)), 3),
        "per_token_p50": round(float(np.median(each)), 4) if each else 0.0,
        "hit_rate": round(sum(r.cached for r in counted) / sum(r.tokens for r in counted), 4),
        "busy": round(
            sum(replica.busy for replica in fleet.replicas) / (fleet.size * max(r.end for r in by_arrival)), 3
        ),
    }
