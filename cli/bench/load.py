"""Sending: so many at a time (closed), or each when it is due (open)."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator

from cli.bench.client import Client, TransportError
from cli.bench.record import AnswerSink, Failure, Record
from cli.bench.workload import Job

_PAUSE = 0.1  # seconds


class Load:
    """Sends jobs and keeps a record of each.

    In a closed load a failed request is followed by a pause: a server that is gone or full fails requests faster
    than it serves them.

    Args:
        path: of the endpoint.
        timeout: seconds that one request gets.
        on_end: called after each request.
    """

    def __init__(self, client: Client, path: str, timeout: float, on_end: Callable[[Record], None] | None = None):
        self._client = client
        self._path = path
        self._timeout = timeout
        self._on_end = on_end
        self.records: list[Record] = []

    async def closed(self, jobs: Iterable[Job], concurrency: int, seconds: float | None = None) -> None:
        """Keep `concurrency` requests running until the jobs or the seconds are used up; then wait for those
        that run."""
        shared = iter(jobs)
        end = float("inf") if seconds is None else time.perf_counter() + seconds

        async def work() -> None:
            for job in shared:
                now = time.perf_counter()
                if now >= end:
                    return
                record = await self._send(job, now)
                if record.failure is not None:
                    await asyncio.sleep(_PAUSE)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())

    async def open(self, jobs: Iterator[tuple[float, Job]]) -> None:
        """Send each job when its seconds after the start have passed, however many still run; then wait for all
        answers."""
        start: float | None = None
        async with asyncio.TaskGroup() as group:
            for due, job in jobs:
                start = time.perf_counter() if start is None else start  # the first body has been made
                await asyncio.sleep(0)  # the others get their turn even where this load is late
                while (early := start + due - time.perf_counter()) > 0:  # a timer may be early by a millisecond
                    await asyncio.sleep(early)
                group.create_task(self._send(job, start + due))

    async def _send(self, job: Job, scheduled: float) -> Record:
        record = Record(index=job.index, input_len=job.input_len, output_len=job.output_len, scheduled=scheduled)
        self.records.append(record)
        sink = AnswerSink(record)
        record.sent = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                await self._client.exchange("POST", self._path, job.body, sink)
            record.ended = time.perf_counter()
            sink.finish()
        except TimeoutError:
            record.failure = Failure("timeout", f"no complete answer within {self._timeout:g} seconds (--timeout)")
        except TransportError as problem:
            record.failure = record.failure or Failure("connection", str(problem))
        except asyncio.CancelledError:
            record.failure = Failure("interrupted", "the benchmark was stopped")
            raise
        finally:
            record.ended = record.ended or time.perf_counter()
            if self._on_end is not None:
                self._on_end(record)
        return record


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """An endless arrival process, the same for the same seed; the first request is due at once.

    Gaps follow a gamma distribution of shape `burstiness` and mean 1 / rate: 1 is a Poisson process, less is
    burstier, more is steadier. An infinite rate has no gaps.

    Args:
        rate: requests per second.
    """
    rng = random.Random(f"arrivals {seed}")
    now = 0.0
    while True:
        yield now
        if not math.isinf(rate):
            now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
