"""When requests come, and which prompts share a beginning: recorded, or made up."""

from __future__ import annotations

import csv
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from fleets.replica import Request

SHRINK = 16  # of Mooncake's lengths
FEWEST = 6000  # requests of a simulation
COMMON = 0.01  # a block that so many requests of a trace begin with is everybody's, such as a system prompt


def mooncake(folder: Path) -> list[Request]:
    """Mooncake's conversations, a sixteenth as long."""
    lines = (folder / "mooncake" / "conversation_trace.jsonl").read_text().splitlines()
    requests = []
    for line in map(json.loads, lines):
        tokens, output = max(line["input_length"] // SHRINK, 1), max(line["output_length"] // SHRINK, 1)
        requests.append(Request(line["timestamp"] / 1000, tokens, output, line["hash_ids"], 512 // SHRINK))
    return sorted(requests, key=lambda request: request.arrival)


def azure(folder: Path) -> list[Request]:
    """Azure's conversations."""
    with (folder / "azure_llm_2023" / "AzureLLMInferenceTrace_conv.csv").open() as file:
        rows = list(csv.DictReader(file))
    moments = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return sorted(
        (
            Request(moment - moments[0], max(int(row["ContextTokens"]), 1), max(int(row["GeneratedTokens"]), 1))
            for moment, row in zip(moments, rows, strict=True)
        ),
        key=lambda request: request.arrival,
    )


def made_up(count: int = 6000, seed: int = 0) -> list[Request]:
    """Conversations of several turns, each of which begins with all before it, after one system prompt."""
    rng, requests, names = random.Random(seed), [], iter(range(3, 10**9))
    while len(requests) < count:
        moment, blocks = rng.uniform(0, 3600), [0, 1, 2]
        for _ in range(min(1 + int(rng.expovariate(0.4)), 12)):
            blocks = blocks + [next(names) for _ in range(1 + int(rng.lognormvariate(0.8, 1.0)))]
            output = max(int(rng.lognormvariate(3.5, 0.8)), 1)
            requests.append(Request(moment, 64 * len(blocks), output, list(blocks)))
            moment += rng.expovariate(1 / 60)
    return sorted(requests[:count], key=lambda request: request.arrival)


def traces(folder: Path) -> dict[str, list[Request]]:
    """Those that are there, or one that is made up."""
    found: dict[str, list[Request]] = {}
    for name, read in (("mooncake-conversation", mooncake), ("azure-conversation", azure)):
        try:
            found[name] = read(folder)
        except FileNotFoundError:
            print(f"{name} is not in {folder}.", file=sys.stderr)
    return found or {"made-up": made_up()}


def arrivals(trace: Sequence[Request], rate: float, least: int) -> list[Request]:
    """A trace at another rate, in requests a second; as many copies of it at once as `least` requests need."""
    copies = -(-least // len(trace))
    counts: defaultdict[int, int] = defaultdict(int)
    for request in trace:
        for block in request.blocks:
            counts[block] += 1
    own = {block for block, count in counts.items() if count < COMMON * len(trace)}
    span = trace[-1].arrival - trace[0].arrival
    factor = copies * len(trace) / rate / span
    rng, found = random.Random(copies), []
    for copy in range(copies):
        shift = rng.uniform(0, span / len(trace))
        for request in trace:
            blocks = [(block, copy) if copy and block in own else block for block in request.blocks]
            moment = (request.arrival - trace[0].arrival + shift) * factor
            found.append(replace(request, arrival=moment, blocks=[hash(block) for block in blocks]))
    found.sort(key=lambda request: request.arrival)
    return found[: max(least, FEWEST)]
