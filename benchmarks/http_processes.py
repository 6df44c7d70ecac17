"""Processor time per token and per request of each process of `octavo serve --api-server-count N`.

The same streams go to services with 1, 2 and 4 processes that answer HTTP, in turns: long answers, whose tokens count,
and answers of one token, whose requests do. Processor time holds on a machine with fewer cores than processes, where a
throughput would not; what one core of each process could do at most follows from it.

    python benchmarks/http_processes.py --output
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop
from http_cost import TRAINED, children, cpu_seconds, make_shots, send
from load.client import Client, Target
from offline import ROOT, machine
from serving import served

from server.config.settings import DEMO_MODEL

SHAPES = {"tokens": (64, 32, 128), "requests": (512, 32, 1)}  # requests, tokens of a prompt, tokens of an answer
VOCAB_SIZE = 256  # ids of prompts are below it
KINDS = {"engine": "engine.process.main", "http": "server.processes.front"}


class Service:
    """A service under load.

    Args:
        url: its address.
        pid: its first process: the desk where others answer.
    """

    def __init__(self, url: str, pid: int):
        self._client = Client(Target.parse(url))
        self._pids: dict[str, list[int]] = {kind: [] for kind in KINDS}
        for child in children(pid):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            for kind, module in KINDS.items():
                if module.encode() in command:
                    self._pids[kind].append(child)
        if self._pids["http"]:
            self._pids["desk"] = [pid]
        else:
            self._pids["http"] = [pid]

    async def round(self, shape: str, number: int, concurrency: int) -> dict[str, list[float]]:
        """Microseconds of each process per token, or per request, by what the process does."""
        count, input_len, output_len = SHAPES[shape]
        shots = make_shots(count, VOCAB_SIZE, input_len, output_len, number)
        before = self._seconds()
        await send(self._client, shots, concurrency)
        after, units = self._seconds(), count * output_len
        return {
            kind: [(new - old) / units * 1e6 for old, new in zip(before[kind], after[kind], strict=True)]
            for kind in before
        }

    def _seconds(self) -> dict[str, list[float]]:
        return {kind: [cpu_seconds(pid) for pid in pids] for kind, pids in self._pids.items()}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def summed_up(rounds: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Medians over rounds; the bound is what the busiest process could do with a core of its own."""
    kinds = rounds[0]
    each = {
        kind: [statistics.median(done[kind][place] for done in rounds) for place in range(len(kinds[kind]))]
        for kind in kinds
    }
    busiest = {kind: max(values) for kind, values in each.items()}
    return {
        "us": {kind: [round(value, 1) for value in values] for kind, values in each.items()},
        "us_http_together": round(sum(each["http"]), 1),
        "bound_per_second": {kind: round(1e6 / value) for kind, value in busiest.items() if value > 0},
    }


async def measure(services: dict[int, Service], options: argparse.Namespace) -> dict[str, Any]:
    """All figures, by shape and number of processes."""
    found: dict[str, dict[int, list[dict[str, list[float]]]]] = {
        shape: {count: [] for count in services} for shape in SHAPES
    }
    for shape in SHAPES:
        for service in services.values():
            await service.round(shape, -1, options.concurrency)  # warm
        for number in range(options.rounds):
            for count, service in services.items():
                found[shape][count].append(await service.round(shape, number, options.concurrency))
    return {
        shape: {str(count): summed_up(rounds) for count, rounds in by_count.items()}
        for shape, by_count in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TRAINED if TRAINED.is_dir() else DEMO_MODEL))
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", action="store_true", help="write benchmarks/results/http-processes.json")
    options = parser.parse_args()
    settings = {
        "OCTAVO_MAX_NUM_SEQS": str(options.concurrency),
        "OCTAVO_MAX_QUEUE_TIME": "0",
        "OCTAVO_ENABLE_PREFIX_CACHING": "false",
        "OCTAVO_LOG_LEVEL": "warning",
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        services = {}
        for count in options.counts:
            asked = settings | {"OCTAVO_API_SERVER_COUNT": str(count)}
            port, pid = stack.enter_context(served([options.model], asked, Path(folder) / f"{count}.log"))
            services[count] = Service(f"http://127.0.0.1:{port}", pid)
            stack.callback(services[count].close)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            rows = runner.run(measure(services, options))
    names = ("requests", "input_len", "output_len")
    shapes = {name: dict(zip(names, shape, strict=True)) for name, shape in SHAPES.items()}
    result = {
        "benchmark": "http-processes",
        "machine": machine(),
        "model": Path(options.model).name,
        "concurrency": options.concurrency,
        "rounds": options.rounds,
        "shapes": shapes,
        "results": rows,
    }
    print(json.dumps(result, indent=2))
    if options.output:
        path = ROOT / "benchmarks" / "results" / "http-processes.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written to {path}")


if __name__ == "__main__":
    main()
