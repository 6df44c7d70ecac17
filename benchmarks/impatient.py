"""Throughput of a full service whose clients do not wait: three times as many clients as places, against just as many.

Four loads on `octavo serve` with the bundled model, over loopback, in turns:

    full       as many streams as places, each followed by the next
    retry      `--factor` times as many clients; a refused client asks again at once
    leave      the same; a client without a first token after `--patience` seconds also hangs up and asks again
    unlimited  like leave, on a service that never refuses a request for a long queue (--max-queue-time 0)

The goal: tokens that clients receive in a second, at least 0.9 of those of the full load on the same service. Client
and service share the machine.

    python benchmarks/impatient.py --rounds 3 --duration 8
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop
from load.client import Client, Target, TransportError
from load.record import AnswerSink, Record
from offline import machine
from serving import parser_of, report, served

GOAL = 0.9
RATE = "tokens a second"


class CountingSink(AnswerSink):
    """Notes when tokens come. An event may bring several, so that the server counts them.

    Args:
        seen: pairs of a time and a number of tokens; gets those of the answer.
    """

    def __init__(self, record: Record, seen: list[tuple[float, int]]):
        super().__init__(record)
        self._seen, self._own = seen, record

    def on_data(self, data: bytes, when: float) -> None:
        before = self._own.completion_tokens or 0
        super().on_data(data, when)
        self._seen.append((when, (self._own.completion_tokens or 0) - before))


class Load:
    """A load and its counts.

    Args:
        patience: seconds that a client waits for the first token; None: as long as it takes.
    """

    def __init__(self, port: int, options: argparse.Namespace, patience: float | None):
        self._client = Client(Target.parse(f"http://127.0.0.1:{port}"))
        self._options, self._patience = options, patience
        self._random = random.Random(0)
        self.tokens: list[tuple[float, int]] = []
        self.counts = {"complete": 0, "refused": 0, "left": 0, "failed": 0}

    def _body(self) -> bytes:
        words = " ".join(self._random.choice(("Anna", "Ben", "a cat", "a dog", "saw", "liked")) for _ in range(60))
        length = self._random.randint(self._options.output_len // 2, self._options.output_len * 3 // 2)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": words, "max_tokens": length, "ignore_eos": True, "stream": True, "stream_options": usage}
        return json.dumps(body).encode()

    async def _one(self) -> str:
        record = Record(index=0, output_len=0, sent=time.perf_counter())
        sink = CountingSink(record, self.tokens)
        asked = asyncio.ensure_future(self._client.exchange("POST", "/v1/completions", self._body(), sink))
        try:
            await asyncio.wait({asked}, timeout=self._patience)
            if not asked.done() and not record.times:
                return "left"
            await asked
            sink.finish()
        except TransportError:
            return "failed"
        finally:
            asked.cancel()
            await asyncio.wait({asked})
        if record.failure is None:
            return "complete"
        return "refused" if record.failure.kind == "http 503" else "failed"

    async def run(self, clients: int) -> float:
        """Tokens a second after the first quarter."""
        began = time.perf_counter()
        end = began + self._options.duration

        async def client() -> None:
            while time.perf_counter() < end:
                self.counts[await self._one()] += 1

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        await asyncio.sleep(self._options.duration)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._client.close()
        start = began + self._options.duration / 4
        return sum(tokens for when, tokens in self.tokens if start <= when < end) / (end - start)


async def measure(port: int, options: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Some loads on a service, in turns."""
    gc.collect()
    gc.freeze()
    found: dict[str, list[tuple[float, dict[str, int]]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            patience = options.patience if name in ("leave", "unlimited") else None
            load = Load(port, options, patience)
            clients = options.slots * (1 if name == "full" else options.factor)
            rate = await load.run(clients)
            found[name].append((rate, load.counts))
            await asyncio.sleep(0.5)
    middle: Callable[[str], float] = lambda name: statistics.median(rate for rate, _ in found[name])  # noqa: E731
    result: dict[str, Any] = {}
    for name in names:
        counts = {kind: sum(one[kind] for _, one in found[name]) for kind in found[name][0][1]}
        result[name] = {RATE: round(middle(name)), **counts}
        if name != "full":
            result[name]["of full"] = round(middle(name) / middle("full"), 3)
            result[name]["goal met"] = middle(name) >= GOAL * middle("full")
    return result


def main() -> None:
    """Entry point."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each load")
    parser.add_argument("--duration", type=float, default=8.0, help="seconds of each load")
    parser.add_argument("--slots", type=int, default=24, help="requests that run at a time (--max-num-seqs)")
    parser.add_argument("--factor", type=int, default=3, help="impatient clients for each place")
    parser.add_argument("--patience", type=float, default=0.5, help="seconds that a client waits for the first token")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer, in the mean")
    options = parser.parse_args()
    arguments = [*options.serve, f"--max-num-seqs={options.slots}"]
    result: dict[str, Any] = {"machine": machine()}
    for title, more, names in (
        ("defaults", [], ("full", "retry", "leave")),
        ("--max-queue-time 0", ["--max-queue-time=0"], ("full", "unlimited")),
    ):
        with (
            tempfile.TemporaryDirectory() as folder,
            served([*arguments, *more], {}, Path(folder) / "log") as (port, _),
        ):
            result[title] = uvloop.run(measure(port, options, names))
    report(result, options.json)


if __name__ == "__main__":
    main()
