"""A closed load: so many requests at a time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from load.client import Client, TransportError
from load.record import AnswerSink, Failure, Record

_PAUSE = 0.1  # seconds


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send."""

    index: int
    output_len: int
    body: bytes


def streamed(index: int, prompt: list[int], output_len: int, **fields: Any) -> Job:
    """A greedy completion of exactly `output_len` tokens, streamed, with further fields of the body."""
    body = fields | {
        "prompt": prompt,
        "max_tokens": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Job(index, output_len, json.dumps(body).encode())


async def send(
    client: Client, path: str, jobs: Iterable[Job], concurrency: int, timeout: float = 600.0
) -> list[Record]:
    """Keep `concurrency` requests running until the jobs are used up; returns a record of each.

    A failed request is followed by a pause: a server that is gone or full fails requests faster than it serves them.

    Args:
        path: of the endpoint.
        timeout: seconds that one request gets.
    """
    shared, records = iter(jobs), []

    async def work() -> None:
        for job in shared:
            record = Record(index=job.index, output_len=job.output_len, sent=time.perf_counter())
            records.append(record)
            await _send(client, path, job.body, record, timeout)
            if record.failure is not None:
                await asyncio.sleep(_PAUSE)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return records


async def _send(client: Client, path: str, body: bytes, record: Record, timeout: float) -> None:
    sink = AnswerSink(record)
    try:
        async with asyncio.timeout(timeout):
            await client.exchange("POST", path, body, sink)
        record.ended = time.perf_counter()
        sink.finish()
    except TimeoutError:
        record.failure = Failure("timeout", f"no complete answer within {timeout:g} seconds")
    except TransportError as problem:
        record.failure = record.failure or Failure("connection", str(problem))
    record.ended = record.ended or time.perf_counter()
