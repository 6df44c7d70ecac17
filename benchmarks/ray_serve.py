"""Ray Serve before the service: what it costs, and what its prefix-aware router finds in caches.

    PYTHONPATH=.:.venv/clients/ray .venv/bin/python benchmarks/ray_serve.py throughput --output
    PYTHONPATH=.:.venv/clients/ray .venv/bin/python benchmarks/ray_serve.py routing --output

`throughput` sends the same streams to `octavo serve` and to one replica of Serve, in turns; both have one thread to
compute, and both are there all the time, the other one idle. Processor time by process is that of a round.

`routing` sends conversations to two replicas behind the prefix-aware router, and to two behind Serve's own, the less
busy of two, in turns. Their caches hold what all conversations need once, not twice. What was found in a cache, each
answer says itself (usage.prompt_tokens_details).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvloop
from http_cost import children, cpu_seconds, make_shots, send
from load.client import Client, Target
from offline import ROOT, machine
from peers.checkpoints import SHAPES, make_decoder
from serving import served

ENGINE = b"engine.process.main"
# Conversations at a time, systems among them, turns, and tokens of a system, of what a turn adds, and of an answer.
CONVERSATIONS, SYSTEMS, TURNS = 48, 4, 6
SYSTEM, TURN, ANSWER = 192, 64, 8
CLIENTS = 8
BLOCKS, BLOCK = 1200, 16  # of a replica: 19,200 tokens, as many as all conversations are


@contextmanager
def cluster(applications: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Ray on this machine, with Serve and these applications, by route; its URL."""
    import ray
    from ray import serve

    from server.replicas.application import build

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory(prefix="octavo-ray-") as folder:
        ray.init("local", include_dashboard=False, num_cpus=8, _temp_dir=folder, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        try:
            for route, arguments in applications.items():
                serve.run(build(arguments), name=route.strip("/") or "default", route_prefix=route)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def titled(title: str) -> list[int]:
    """Processes that Ray has given such a title."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(title.encode()):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def seconds(pids: Iterable[int]) -> float:
    """Processor seconds of these processes together."""
    return sum(cpu_seconds(pid) for pid in pids)


def engines(pid: int) -> list[int]:
    """The engines among a process's children."""
    return [child for child in children(pid) if ENGINE in Path(f"/proc/{child}/cmdline").read_bytes()]


class Way:
    """One way to the model.

    Args:
        url: where it is.
        processes: by what they do.
    """

    def __init__(self, url: str, processes: dict[str, list[int]]):
        self.client = Client(Target.parse(url))
        self._processes = processes
        self.rounds: list[dict[str, Any]] = []

    async def round(self, number: int, options: argparse.Namespace) -> None:
        """Streams, `concurrency` at a time; their figures are kept unless `number` is negative."""
        shots = make_shots(options.requests, SHAPES["S"]["vocab_size"], 32, options.output_len, number)
        before = {kind: seconds(pids) for kind, pids in self._processes.items()}
        start = time.perf_counter()
        await send(self.client, shots, options.concurrency)
        took = time.perf_counter() - start
        tokens = options.requests * options.output_len
        used = {kind: (seconds(pids) - before[kind]) / tokens * 1e6 for kind, pids in self._processes.items()}
        if number >= 0:
            self.rounds.append({"tokens_per_second": tokens / took, "us_per_token": used})


def throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second directly and through Serve, and processor time per token of each process."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = Path(folder) / "model"
        make_decoder(model, SHAPES["S"])
        settings = {
            "model": str(model), "dtype": "bfloat16", "device": "cpu", "kv_cache_memory": "512MiB",
            "max_num_seqs": options.concurrency, "max_queue_time": 0, "enable_prefix_caching": False,
            "served_model_name": "S", "log_level": "warning", "threads": options.threads,
        }  # fmt: skip
        variables = {f"OCTAVO_{name.upper()}": str(value) for name, value in settings.items()}
        port, pid = stack.enter_context(served([], variables, Path(folder) / "log"))
        url = stack.enter_context(cluster({"/": settings}))
        (replica,), (proxy,) = titled("ray::ServeReplica"), titled("ray::ProxyActor")
        ways = {
            "direct": Way(f"http://127.0.0.1:{port}", {"engine": engines(pid), "http": [pid]}),
            "serve": Way(url, {"engine": engines(replica), "replica": [replica], "proxy": [proxy]}),
        }
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for number in range(-1, options.rounds):
                for way in ways.values() if number % 2 else reversed(ways.values()):
                    runner.run(way.round(number, options))
        for way in ways.values():
            way.client.close()
    pairs = zip(ways["serve"].rounds, ways["direct"].rounds, strict=True)
    ratios = [one["tokens_per_second"] / other["tokens_per_second"] for one, other in pairs]
    return {
        "model": "random weights of SmolLM2-135M's shape, bfloat16",
        "threads": options.threads, "streams": options.concurrency, "requests": options.requests,
        "output_len": options.output_len, "rounds": options.rounds,
        "ratio": {"median": round(statistics.median(ratios), 3), "all": [round(ratio, 3) for ratio in ratios]},
        "ways": {name: summed_up(way.rounds) for name, way in ways.items()},
    }  # fmt: skip


def summed_up(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds."""
    return {
        "tokens_per_second": round(statistics.median(done["tokens_per_second"] for done in rounds), 1),
        "us_per_token": {
            kind: round(statistics.median(done["us_per_token"][kind] for done in rounds), 1)
            for kind in rounds[0]["us_per_token"]
        },
    }


class Talk:
    """A conversation, as token ids."""

    def __init__(self, rng: random.Random, system: list[int]):
        self._rng = rng
        self.prompt = list(system)
        self.before = 0  # tokens that an earlier turn had sent

    def next(self) -> list[int]:
        """The next turn's prompt."""
        self.prompt += [self._rng.randrange(3, SHAPES["tiny"]["vocab_size"]) for _ in range(TURN)]
        return self.prompt


async def talks(url: str, seed: int) -> dict[str, float]:
    """All conversations, whose turns come in turns; what was found in caches, and seconds of answers."""
    rng = random.Random(seed)
    systems = [[rng.randrange(3, SHAPES["tiny"]["vocab_size"]) for _ in range(SYSTEM)] for _ in range(SYSTEMS)]
    all_talks = [Talk(rng, systems[number % SYSTEMS]) for number in range(CONVERSATIONS)]
    prompts = cached = possible = 0
    took: list[float] = []

    async with httpx.AsyncClient(timeout=600) as client:

        async def turns(own: list[Talk]) -> None:
            nonlocal prompts, cached, possible
            for _ in range(TURNS):
                for talk in own:
                    before = len(talk.prompt)
                    body = {"prompt": talk.next(), "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
                    start = time.perf_counter()
                    answer = await client.post(f"{url}/v1/completions", json=body)
                    took.append(time.perf_counter() - start)
                    usage = answer.raise_for_status().json()["usage"]
                    prompts += usage["prompt_tokens"]
                    cached += usage["prompt_tokens_details"]["cached_tokens"]
                    possible += before

        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(turns(all_talks[number::CLIENTS]))
    return {
        "found": cached / prompts, "could_be_found": possible / prompts, "median_seconds": statistics.median(took),
    }  # fmt: skip


def routing(options: argparse.Namespace) -> dict[str, Any]:
    """The shares of prompts that were found in caches, by router."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        make_decoder(Path(folder), SHAPES["tiny"])
        settings = {
            "model": folder, "device": "cpu", "threads": 1, "num_gpu_blocks_override": BLOCKS, "block_size": BLOCK,
            "max_num_seqs": 8, "log_level": "warning", "num_cpus": 0.5, "min_replicas": 2, "max_replicas": 2,
        }  # fmt: skip
        routers = ("prefix", "power-of-two")
        url = stack.enter_context(cluster({f"/{name}": settings | {"request_router": name} for name in routers}))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in routers}
        for number in range(options.rounds):
            for name in routers if number % 2 else reversed(routers):
                found[name].append(asyncio.run(talks(f"{url}/{name}", 100 * number)))
    return {
        "replicas": 2, "conversations": CONVERSATIONS, "systems": SYSTEMS, "turns": TURNS, "system_tokens": SYSTEM,
        "turn_tokens": TURN, "answer_tokens": ANSWER, "clients": CLIENTS, "pages_of_a_replica": BLOCKS,
        "page_tokens": BLOCK, "rounds": options.rounds,
        "routers": {
            name: {key: round(statistics.median(done[key] for done in rounds), 3) for key in rounds[0]}
            | {"found_all": [round(done["found"], 3) for done in rounds]}
            for name, rounds in found.items()
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("throughput", "routing"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", action="store_true", help="write benchmarks/results/ray-serve-WHAT.json")
    options = parser.parse_args()
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # else 15: not what it compares with
    before = os.getloadavg()[0]
    measured = throughput(options) if options.what == "throughput" else routing(options)
    result = {
        "benchmark": f"ray-serve-{options.what}", "machine": machine() | {"load_before": round(before, 1)},
        **measured,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.output:
        path = ROOT / "benchmarks" / "results" / f"ray-serve-{options.what}.json"
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
