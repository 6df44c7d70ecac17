"""One replica: what its steps take, the requests that it serves, its batch and its cache."""

from __future__ import annotations

import heapq
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Service:
    """The requests that a replica accepts, and its memory.

    Attributes:
        step: seconds that a step takes at least.
        token: further seconds for each prompt token, `pair` for each pair of a prompt token and what it attends to.
        row: further seconds for each decoding row, `context` for each token that these read.
        most_tokens: prompt tokens of a step, as far as these take no more than most_seconds.
        most_rows: requests at a time.
        cache: tokens that the pages hold.
    """

    step: float
    token: float
    pair: float
    row: float
    context: float
    most_tokens: int = 2048
    most_seconds: float = 0.25
    most_rows: int = 128
    cache: int = 186_000

    def prompt(self, start: int, count: int) -> float:
        """Seconds of a chunk of a prompt."""
        return count * self.token + self.pair * count * (start + (count + 1) / 2)

    def alone(self, tokens: int, output: int) -> float:
        """Seconds that a request takes of a replica that is busy with 16 others of its kind."""
        rows = 16
        return self.prompt(0, tokens) + output * (self.step / rows + self.row + self.context * (tokens + output / 2))


@dataclass
class Request:
    """One request.

    Attributes:
        arrival: seconds.
        tokens, output: of the prompt and of the answer.
        blocks: what the prompt begins with, each standing for `block` tokens; equal ones have equal contents, and the
            same before them.
        cached: tokens that were found, once it is admitted.
        first, end: seconds at which the first and the last token came.
    """

    arrival: float
    tokens: int
    output: int
    blocks: Sequence[int] = ()
    block: int = 64
    cached: int = 0
    first: float = math.nan
    end: float = math.nan


def serviceable(service: Service, trace: Sequence[Request]) -> float:
    """Requests a second that a replica can serve if it never finds anything cached."""
    return 1.0 / statistics.fmean(service.alone(request.tokens, request.output) for request in trace)


class Replica:
    """Continuous batching: each step gives every decoding row a token, and prompts what is left."""

    def __init__(self, service: Service, evicted: Callable[[int], None], stored: Callable[[int], None]):
        self._service = service
        self._evicted, self._stored = evicted, stored
        self.now = 0.0  # when the step in flight ends
        self.busy = 0.0
        self.unfinished = 0
        self.pending = 0.0  # seconds of prompts that are not computed
        self._steps = 0
        self._rows: list[tuple[int, int, Request]] = []  # by the step after which they end
        self._context = 0  # tokens that the rows read in the next step
        self._waiting: deque[Request] = deque()
        self._prompts: deque[tuple[Request, int]] = deque()  # and what of it is computed
        self._held = 0  # tokens of admitted requests
        self._cached: OrderedDict[int, int] = OrderedDict()  # tokens of blocks, least recently used first
        self._size = 0
        self._number = 0

    def known(self, request: Request) -> int:
        """Tokens of a prompt that are cached; the last one never is."""
        count = 0
        for block in request.blocks:
            if block not in self._cached:
                break
            count += request.block
        return min(count, request.tokens - 1)

    def add(self, request: Request) -> None:
        """A request comes, `advance` having been called for the time of its arrival."""
        self.now = max(self.now, request.arrival)
        self.unfinished += 1
        self.pending += self._service.prompt(0, request.tokens)
        self._waiting.append(request)

    def next_event(self) -> float:
        """When something changes by itself; infinite if nothing will."""
        self._admit()
        if self._prompts:
            return self.now + self._chunk()[0]
        if self._rows:
            return self.now + self._decoding(self._rows[0][0] - self._steps)
        return math.inf

    def advance(self, until: float) -> list[Request]:
        """Run the steps that begin before a moment; what ended."""
        ended: list[Request] = []
        while self.now < until:
            self._admit()
            if self._prompts:
                seconds, chunks = self._chunk()
                self._take(1, seconds)
                self._compute(chunks)
            elif self._rows:
                left = self._rows[0][0] - self._steps
                count = self._count(until - self.now, left)
                self._take(count, self._decoding(count))
            else:
                break
            self._finish(ended)
        return ended

    def _take(self, count: int, seconds: float) -> None:
        self._steps += count
        self._context += count * len(self._rows)
        self.now += seconds
        self.busy += seconds

    def _finish(self, ended: list[Request]) -> None:
        while self._rows and self._rows[0][0] <= self._steps:
            request = heapq.heappop(self._rows)[2]
            request.end = self.now
            self._context -= request.tokens + request.output
            self._held -= request.tokens + request.output
            self._store(request)
            self.unfinished -= 1
            ended.append(request)

    def _compute(self, chunks: list[tuple[Request, int, int]]) -> None:
        for request, start, count in chunks:
            self._prompts.popleft()
            self.pending -= self._service.prompt(start, count)
            if start + count < request.tokens:
                self._prompts.appendleft((request, start + count))
                continue
            request.first = self.now
            self._store(request)
            self._number += 1
            heapq.heappush(self._rows, (self._steps + request.output - 1, self._number, request))
            self._context += request.tokens + 1

    def _admit(self) -> None:
        service = self._service
        while self._waiting and len(self._rows) + len(self._prompts) < service.most_rows:
            request = self._waiting[0]
            size = request.tokens + request.output
            if self._held and self._held + size > service.cache:
                return
            self._waiting.popleft()
            self._held += size
            request.cached = self.known(request)
            for block in request.blocks:
                if block not in self._cached:
                    break
                self._cached.move_to_end(block)
            self.pending -= service.prompt(0, request.cached)
            self._prompts.append((request, request.cached))
            self._shrink()

    def _chunk(self) -> tuple[float, list[tuple[Request, int, int]]]:
        """A step with prompts: its seconds, and which parts it computes."""
        service = self._service
        seconds = service.step + len(self._rows) * service.row + self._context * service.context
        room, tokens, chunks = service.most_seconds - seconds, service.most_tokens, []
        for request, start in self._prompts:
            count = min(request.tokens - start, tokens)
            each = service.token + service.pair * (start + count / 2)
            count = min(count, max(int(min(room / each, tokens)), 0 if chunks else 16))
            if count <= 0:
                break
            part = service.prompt(start, count)
            chunks.append((request, start, count))
            seconds, room, tokens = seconds + part, room - part, tokens - count
            if start + count < request.tokens:
                break
        return seconds, chunks

    def _decoding(self, count: int) -> float:
        """Seconds of so many steps in which only the rows decode."""
        service, rows = self._service, len(self._rows)
        read = self._context * count + rows * count * (count - 1) / 2
        return count * (service.step + rows * service.row) + service.context * read

    def _count(self, seconds: float, most: int) -> int:
        """The number of steps that begin within so many seconds: at least one, at most those to the next end."""
        low, high = 1, max(most, 1)
        while low < high:
            middle = (low + high) // 2
            if self._decoding(middle) < seconds:
                low = middle + 1
            else:
                high = middle
        return low

    def _store(self, request: Request) -> None:
        for block in request.blocks:
            if block in self._cached:
                self._cached.move_to_end(block)
            else:
                self._cached[block] = request.block
                self._size += request.block
                self._stored(block)
        self._shrink()

    def _shrink(self) -> None:
        # Running requests' own pages go first; what is left holds blocks for later.
        while self._cached and self._size > max(self._service.cache - self._held, 0):
            block, size = self._cached.popitem(last=False)
            self._size -= size
            self._evicted(block)
