"""Hit rates of the prefix cache for pools of several sizes: traces run through the engine's own pool of pages.

    python benchmarks/eviction.py --output

Requests of a trace come one after the other. Each adopts the pages that are known, takes new ones for the rest of its
prompt and for its answer, and gives all of them up. A page here is a block of the trace. With --workloads, by default
../shared/data/workloads, the traces are Mooncake's conversations and its synthetic requests (blocks of 512 tokens).
Agents are made up: 480 conversations over eight hours, with one of three system prompts of 20 thousand tokens, 60 to
600 new tokens a turn, 16 turns on average, subagents, and a short request for a title each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.scheduling.block_pool import BlockPool  # noqa: E402

WORKLOADS = ROOT.parent / "shared" / "data" / "workloads"
SYSTEMS, SYSTEM, SUBSYSTEM = (0.6, 0.3, 0.1), 20_000, 6_000  # how often each is used; tokens
CONVERSATIONS, HOURS, TURNS = 480, 8, 15
LEAST, MOST = 60, 600  # tokens that a turn adds


class Request(NamedTuple):
    """One request: its moment, the blocks of its prompt, and how many its answer takes."""

    moment: float
    blocks: Sequence[int]
    answer: int


class Trace(NamedTuple):
    """Requests in order, the tokens of a block, and the sizes of pools, in tokens."""

    requests: list[Request]
    block: int
    sizes: Sequence[int]


def mooncake(file: Path) -> Trace:
    """One of Mooncake's traces."""
    lines = map(json.loads, file.read_text().splitlines())
    made = [Request(line["timestamp"], line["hash_ids"], -(-line["output_length"] // 512)) for line in lines]
    return Trace(sorted(made), 512, (1_000_000, 2_000_000, 4_000_000, 8_000_000, 16_000_000))


def agents(seed: int = 0, block: int = 128) -> Trace:
    """Agents' conversations, made up."""
    rng, made, names = random.Random(seed), list[Request](), itertools.count()

    def new(tokens: int) -> list[int]:
        return list(itertools.islice(names, max(tokens // block, 1)))

    systems, subsystems = ([new(size) for _ in SYSTEMS] for size in (SYSTEM, SUBSYSTEM))
    for _ in range(CONVERSATIONS):
        kind = rng.choices(range(len(SYSTEMS)), SYSTEMS)[0]
        moment, chain = rng.uniform(0, HOURS * 3600), [*systems[kind], *new(2000)]
        made.append(Request(moment, new(256), 1))  # for a title
        for _ in range(1 + int(rng.expovariate(1 / TURNS))):
            chain = chain + new(rng.randint(LEAST, MOST))
            made.append(Request(moment, chain, 1))
            moment += rng.expovariate(1 / 20)
            if rng.random() < 0.06:
                branch, own = [*subsystems[kind], *new(1000)], moment
                for _ in range(rng.randint(2, 8)):
                    branch = branch + new(MOST)
                    made.append(Request(own, branch, 1))
                    own += rng.expovariate(1 / 10)
            if rng.random() < 0.1:
                moment += rng.expovariate(1 / 600)  # somebody thinks
    return Trace(sorted(made), block, (24_000, 32_000, 48_000, 64_000, 96_000, 128_000, 256_000))


def hit_rate(requests: Sequence[Request], num_pages: int) -> float:
    """The share of all prompts that is found in a pool of so many pages."""
    pool, sent, found, answers = BlockPool(num_pages), 0, 0, itertools.count()
    for request in requests:
        names = [block.to_bytes(8) for block in request.blocks]
        names += [b"answer" + next(answers).to_bytes(8) for _ in range(request.answer)]
        known = pool.match(names[: len(request.blocks)])
        sent += len(request.blocks)
        if len(names) > num_pages:
            continue
        table = pool.adopt(known)
        new = pool.reserve(len(names) - len(known))
        assert new is not None
        found += len(known)
        for page, name in zip(new, names[len(known) :], strict=True):
            pool.publish(page, name)
        pool.free([*table, *new])
    return found / sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=Path, default=WORKLOADS)
    parser.add_argument(
        "--output",
        type=Path,
        nargs="?",
        const=ROOT / "benchmarks" / "results" / "eviction.json",
        help="JSON file to write",
    )
    options = parser.parse_args()
    found = {"agents": agents()}
    for name in ("conversation", "synthetic"):
        file = options.workloads / "mooncake" / f"{name}_trace.jsonl"
        if file.exists():
            found[f"mooncake {name}"] = mooncake(file)
        else:
            print(f"{file} is not there.", file=sys.stderr)
    result: dict[str, dict[str, float]] = {}
    for name, trace in found.items():
        everything = len({block for request in trace.requests for block in request.blocks}) + sum(
            request.answer for request in trace.requests
        )
        sizes = {str(size): size // trace.block for size in trace.sizes} | {"unbounded": everything}
        result[name] = {size: round(hit_rate(trace.requests, num_pages), 4) for size, num_pages in sizes.items()}
        print(name, result[name], flush=True)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
