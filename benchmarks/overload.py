"""The effect of a crowd ten times too large on the requests that the service accepts, and on those that it refuses.

Two loads on `octavo serve` with the bundled model, at its defaults, over loopback:

    full       as many streams as run at a time, each followed by the next: the service is full, and nothing waits long
    overload   requests arrive at random at `--factor` times the rate that the first load was answered with, whatever
               becomes of those before; it follows the first load at once

For both the time from the first byte sent to the first token of the accepted, for the second the time to the status of
the refused. The goals: refusals within 50 ms at the 99th percentile, and the accepted ones' 99th percentile within
twice that of the full service. Client and service share the machine.

    python benchmarks/overload.py --duration 15
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import uvloop
from offline import machine
from serving import parser_of, quantiles, report, served

SLOTS = 128  # max_num_seqs at its default
MOST_OPEN = 4000  # connections
GOAL_REFUSAL = 0.05  # seconds
GOAL_RATIO = 2.0


@dataclass
class Seen:
    """The outcomes of a load's requests, in seconds since each was sent."""

    first_tokens: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    failed: int = 0
    not_sent: int = 0


class Connection(asyncio.Protocol):
    """A connection that is kept, with one request at a time."""

    def __init__(self) -> None:
        self._done: asyncio.Future[bool] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop has a class of its own

    def connection_lost(self, problem: Exception | None) -> None:
        self._transport = None
        if self._done is not None and not self._done.done():
            self._done.set_result(False)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._status is None and b"\r\n\r\n" in self._received:
            self._status = int(self._received[9:12])
            if self._status == 503:
                self._seen.refusals.append(time.monotonic() - self._sent)
        if self._status == 200 and not self._begun and b"data: " in self._received:
            self._begun = True
            self._seen.first_tokens.append(time.monotonic() - self._sent)
        over = self._received.endswith(b"0\r\n\r\n" if self._status == 200 else b"}")
        if self._status is not None and over and self._done is not None and not self._done.done():
            self._done.set_result(True)
        self._received = self._received[-16:] if self._begun else self._received

    @property
    def is_open(self) -> bool:
        """Another request can be sent."""
        return self._transport is not None

    async def ask(self, request: bytes, seen: Seen) -> int | None:
        """Send a request and read all of its answer; the status, or None where the connection broke."""
        self._seen, self._received = seen, b""
        self._status: int | None = None
        self._begun = False
        self._done = asyncio.get_running_loop().create_future()
        self._sent = time.monotonic()
        assert self._transport is not None
        self._transport.write(request)
        whole = await self._done
        if not whole:
            seen.failed += 1
            return None
        seen.failed += self._status not in (200, 503)
        return self._status


class Crowd:
    """Clients of one service, whose connections are kept for the next request."""

    def __init__(self, port: int, options: argparse.Namespace):
        self._port = port
        self._options = options
        self._random = random.Random(0)
        self._idle: list[Connection] = []
        self._num_answers = 0
        self._clients: list[asyncio.Task[None]] = []
        self._num_open = 0

    def _request(self) -> bytes:
        words = " ".join(self._random.choice(("Anna", "Ben", "a cat", "a dog", "saw", "liked")) for _ in range(12))
        length = self._random.randint(self._options.output_len // 2, self._options.output_len * 3 // 2)
        body = {"prompt": words, "max_tokens": length, "ignore_eos": True, "stream": True}
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

    async def one(self, seen: Seen) -> int | None:
        """A request, from its connection on."""
        request = self._request()
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
            self._num_open -= 1
        if self._idle:
            connection = self._idle.pop()
        elif self._num_open >= MOST_OPEN:
            seen.not_sent += 1
            return None
        else:
            self._num_open += 1
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        status = await connection.ask(request, seen)
        self._num_answers += status == 200
        self._idle.append(connection)
        return status

    async def full(self, seconds: float) -> tuple[Seen, float]:
        """The closed load; what was seen after its first quarter, and how many were answered a second. What runs at its
        end goes on."""
        end = time.monotonic() + seconds
        seen = [Seen()]

        async def client() -> None:
            while time.monotonic() < end:
                if await self.one(seen[0]) != 200:
                    await asyncio.sleep(0.05)

        self._clients = [asyncio.create_task(client()) for _ in range(SLOTS)]
        await asyncio.sleep(seconds / 4)
        seen[0], began, before = Seen(), time.monotonic(), self._num_answers
        await asyncio.sleep(end - time.monotonic())
        rate = (self._num_answers - before) / (time.monotonic() - began)
        return seen[0], rate

    async def overload(self, seconds: float, rate: float) -> Seen:
        """The open load."""
        seen, tasks = Seen(), set[asyncio.Task[int | None]]()
        due = time.monotonic()
        end = due + seconds
        while due < end:
            due += self._random.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self.one(seen))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.wait_for(asyncio.gather(*tasks, *self._clients), 120)
        return seen


async def measure(port: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both loads."""
    gc.collect()
    gc.freeze()  # a collection of what the imports have left would stand between an answer and its time
    crowd = Crowd(port, options)
    full, rate = await crowd.full(options.duration)
    overload = await crowd.overload(options.duration, options.factor * rate)
    ratio = quantiles(overload.first_tokens).get("p99", 0.0) / max(quantiles(full.first_tokens).get("p99", 0.0), 1e-9)
    refused = quantiles(overload.refusals).get("p99", 0.0)
    return {
        "answers a second, full": round(rate, 1),
        "requests a second, overload": round(options.factor * rate, 1),
        "full": {"first token": quantiles(full.first_tokens), "refused": len(full.refusals), "failed": full.failed},
        "overload": {
            "first token": quantiles(overload.first_tokens),
            "refused": quantiles(overload.refusals),
            "failed": overload.failed,
            "not sent": overload.not_sent,
        },
        "first token, overload / full, p99": round(ratio, 2),
        "goals met": {"refusals": refused <= GOAL_REFUSAL, "accepted": ratio <= GOAL_RATIO},
    }


def main() -> None:
    """Entry point."""
    parser = parser_of(__doc__)
    parser.add_argument("--duration", type=float, default=15.0, help="seconds of each load")
    parser.add_argument("--factor", type=float, default=10.0, help="of the rate that a full service answers with")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer, in the mean")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(options.serve, {}, Path(folder) / "log") as (port, _):
        result = {"machine": machine(), **uvloop.run(measure(port, options))}
    report(result, options.json)


if __name__ == "__main__":
    main()
