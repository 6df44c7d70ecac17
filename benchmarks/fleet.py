"""How many replicas a load needs, and what routing does to it: a simulation, with service times measured from one.

    python benchmarks/fleet.py measure --output            # one engine on this machine: what steps take
    python benchmarks/fleet.py simulate --output           # fleets of 10, 100 and 1,000 of it; some minutes

Measured is the time of a step by what it holds (prompt tokens, decoding rows, context that is read), on a random
checkpoint of SmolLM2-135M's shape, and how well the simulation foretells that same engine under arrivals. Simulated are
replicas with continuous batching, prompts in chunks, and a prefix cache that drops what was used least recently.

Traces: with --workloads, by default ../shared/data/workloads, Mooncake's conversations, whose blocks of 512 tokens say
which prompts share a beginning (all lengths are divided by 16, as suits so small a model), and Azure's conversations of
2023, in which no two prompts share anything. Without them, conversations are made up. What is longer than the model's
context of 2,048 tokens is left out, as a service would refuse it. Arrivals keep their pattern and are made faster or
slower as a whole; where a fleet needs more requests than a trace has, it is repeated, with conversations of its own in
each copy.

Routing: `random`; `least`: the fewest unfinished requests; `prefix`: the least work before the first token, counting
what waits at a replica and what of the prompt it has not cached.
"""

from __future__ import annotations

import argparse
import csv
import gc
import heapq
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "benchmarks" / "results"
WORKLOADS = ROOT.parent / "shared" / "data" / "workloads"
SIZES = (10, 100, 1000)
LOADS = (0.5, 0.8, 1.0)  # of the rate that a replica can serve without a cache
ROUTINGS = ("random", "least", "prefix")
TARGET = 2.0  # seconds to the first token, for 95 of 100 requests
EACH = 0.1  # seconds for each token after it, for half of them
SHRINK = 16  # of Mooncake's lengths
CONTEXT = 2048  # tokens that the measured model takes
SHORTEST = 120.0  # seconds of a simulation
SUSTAINED = 240.0  # of one that finds out what a fleet can do for long
FEWEST = 6000  # requests of a simulation
WARM = 0.25  # part of a simulation that fills the caches and is not counted
COMMON = 0.01  # a block that so many requests of a trace begin with is everybody's, such as a system prompt


# ---------------------------------------------------------------- one replica


@dataclass(frozen=True)
class Service:
    """What a replica takes and holds.

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
        """Of steps that begin within so many seconds; one at least, and at most the steps to the next end."""
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


# ---------------------------------------------------------------- a fleet


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
    """What those requests felt that came once the caches were warm, and how busy replicas were."""
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


# ---------------------------------------------------------------- traces


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


def simulate(
    service: Service, trace: Sequence[Request], size: int, routing: str, rate: float, shortest: float = SHORTEST
) -> dict[str, float]:
    """A fleet under a trace at so many requests a second for each replica."""
    fleet = Fleet(service, size, routing)
    fleet.run(arrivals(trace, rate * size, max(FEWEST, int(shortest * rate * size))))
    return report(fleet)


def serviceable(service: Service, trace: Sequence[Request]) -> float:
    """Requests a second that a replica can serve if it never finds anything cached."""
    return 1.0 / statistics.fmean(service.alone(request.tokens, request.output) for request in trace)


def size_for(service: Service, trace: Sequence[Request], routing: str, size: int = 100) -> dict[str, float]:
    """The highest rate of a replica at which a fleet keeps to `TARGET` and `EACH`; what a million requests an hour
    need."""
    low, high = 0.0, 4 * serviceable(service, trace)
    found: dict[str, float] = {}
    for _ in range(7):
        rate = (low + high) / 2
        result = simulate(service, trace, size, routing, rate, SUSTAINED)
        if result["first_token_p95"] <= TARGET and result["per_token_p50"] <= EACH:
            low, found = rate, result
        else:
            high = rate
    needed = math.ceil(1e6 / 3600 / low) if low else math.inf
    return {"rate_per_replica": round(low, 4), "replicas_per_million_an_hour": needed, **found}


# ---------------------------------------------------------------- measured


def measure(rounds: int) -> dict[str, Any]:
    """What steps of one engine take, and how an engine and the simulation of it get on with the same arrivals."""
    import torch
    from offline import SHAPE, machine, make_checkpoint

    from engine import LLM

    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), torch.bfloat16)
        llm = LLM(
            folder, skip_tokenizer_init=True, dtype="bfloat16", device="cpu", kv_cache_memory="1GiB", max_step_time=0.0,
            show_progress=False, seed=0,
        )  # fmt: skip
        samples = [sample for _ in range(rounds) for sample in _samples(llm.engine, SHAPE["vocab_size"])]
        service = fit(samples)
        checks = [_check(llm.engine, service, SHAPE["vocab_size"], load) for load in (0.3, 0.7)]
        llm.close()
    return {
        "machine": machine(),
        "model": "random weights of SmolLM2-135M's shape, bfloat16",
        "service": asdict(service),
        "samples": [
            {**sample, "seconds": round(sample["seconds"], 5), "fitted": round(foretold(service, sample), 5)}
            for sample in _medians(samples)
        ],
        "checks": checks,
    }


def foretold(service: Service, sample: dict[str, float]) -> float:
    """Seconds that a step should take."""
    decoding = sample["rows"] * service.row + sample["context"] * service.context
    return service.step + decoding + service.prompt(int(sample["start"]), int(sample["tokens"]))


def fit(samples: Sequence[dict[str, float]]) -> Service:
    """The service whose steps are nearest to what was measured, relatively; nothing takes less than no time."""
    from scipy.optimize import nnls

    medians = _medians(samples)
    columns = [
        [
            1.0,
            sample["tokens"],
            sample["tokens"] * (sample["start"] + (sample["tokens"] + 1) / 2),
            sample["rows"],
            sample["context"],
        ]
        for sample in medians
    ]
    seconds = np.array([sample["seconds"] for sample in medians])
    found, _ = nnls(np.array(columns) / seconds[:, None], np.ones(len(seconds)))
    return Service(*map(float, found))


def _medians(samples: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Of the same step, measured several times."""
    groups: defaultdict[tuple[float, ...], list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample["tokens"], sample["start"], sample["rows"], sample["context"]].append(sample["seconds"])
    names = ("tokens", "start", "rows", "context")
    return [dict(zip(names, key, strict=True)) | {"seconds": statistics.median(all)} for key, all in groups.items()]


def _samples(engine: Any, vocabulary: int) -> Iterable[dict[str, float]]:
    """Steps of one kind each: chunks of a prompt, and rows that decode."""
    for length in (64, 256, 1024, 2040):
        _add(engine, "p", [length], 1, vocabulary)
        yield {"tokens": length, "start": 0, "rows": 0, "context": 0, "seconds": _timed(engine)}
        _drain(engine)
    for rows, context in ((1, 64), (1, 1500), (4, 500), (16, 64), (16, 1000), (48, 300)):
        _add(engine, "d", [context] * rows, 24, vocabulary)
        while len(list(engine.scheduler.groups())) != rows or not all(g.started for g in engine.scheduler.groups()):
            engine.step_deltas()
        now = sum(g.sequences[0].num_tokens for g in engine.scheduler.groups())
        seconds = statistics.median(_timed(engine) for _ in range(9))
        yield {"tokens": 0, "start": 0, "rows": rows, "context": now + 4 * rows, "seconds": seconds}
        for group in list(engine.scheduler.groups()):
            engine.abort_request(group.request.request_id)


def _timed(engine: Any) -> float:
    began = time.perf_counter()
    engine.step_deltas()
    return time.perf_counter() - began


def _add(engine: Any, name: str, lengths: Sequence[int], output: int, vocabulary: int) -> None:
    from engine import SamplingParams

    rng = np.random.default_rng()  # nothing is to be found in the cache
    for place, length in enumerate(lengths):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.add_request(f"{name}{place}", rng.integers(3, vocabulary, length).tolist(), params)


def _drain(engine: Any) -> None:
    while engine.has_unfinished_requests():
        engine.step_deltas()


def _check(engine: Any, service: Service, vocabulary: int, load: float, count: int = 40) -> dict[str, float]:
    """The same arrivals for the engine and for its simulation."""
    rng = random.Random(round(100 * load))
    kinds = [Request(0.0, rng.randint(50, 1200), rng.randint(8, 60)) for _ in range(count)]
    rate, moment = load * serviceable(service, kinds), 0.0
    for request in kinds:
        moment += rng.expovariate(rate)
        request.arrival = moment
    fleet = Fleet(replace(service, most_seconds=math.inf), 1, "random")
    fleet.run(replace(request) for request in kinds)
    measured = _arrive(engine, kinds, vocabulary)

    def mean(found: Iterable[Request], moment: str) -> float:
        return round(statistics.fmean(getattr(request, moment) - request.arrival for request in found), 3)

    return {
        "load": load,
        "requests": count,
        "first_token_measured": mean(measured, "first"),
        "first_token_simulated": mean(fleet.ended, "first"),
        "whole_measured": mean(measured, "end"),
        "whole_simulated": mean(fleet.ended, "end"),
    }


def _arrive(engine: Any, kinds: Sequence[Request], vocabulary: int) -> list[Request]:
    from engine import SamplingParams

    tokens = np.random.default_rng()
    found = {str(number): replace(request) for number, request in enumerate(kinds)}
    waiting, began = deque(found.items()), time.perf_counter()
    gc.collect()
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - began
        while waiting and waiting[0][1].arrival <= now:
            name, request = waiting.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=request.output, ignore_eos=True)
            engine.add_request(name, tokens.integers(3, vocabulary, request.tokens).tolist(), params)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[0][1].arrival - now))
            continue
        for delta in engine.step_deltas():
            now = time.perf_counter() - began
            if delta.choices and math.isnan(found[delta.request_id].first):
                found[delta.request_id].first = now
            if delta.finished:
                found[delta.request_id].end = now
    return list(found.values())


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure", help="service times of one engine")
    one.add_argument("--rounds", type=int, default=5)
    many = commands.add_parser("simulate", help="fleets of it")
    many.add_argument("--service", type=Path, default=RESULTS / "fleet-service.json", help="what measure has written")
    many.add_argument("--workloads", type=Path, default=WORKLOADS)
    many.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    many.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    many.add_argument("--routings", choices=ROUTINGS, nargs="+", default=list(ROUTINGS))
    many.add_argument("--no-sizing", action="store_true", help="leave out what a million requests an hour need")
    for command, name in ((one, "fleet-service.json"), (many, "fleet.json")):
        command.add_argument("--output", type=Path, nargs="?", const=RESULTS / name, help="JSON file to write")
    options = parser.parse_args()
    result = measure(options.rounds) if options.command == "measure" else _simulate(options)
    text = json.dumps(result, indent=1) + "\n"
    if options.output:
        options.output.write_text(text)
    print(text)


def _simulate(options: argparse.Namespace) -> dict[str, Any]:
    measured = json.loads(options.service.read_text())
    service = Service(**measured["service"])
    result: dict[str, Any] = {
        "service": measured["service"],
        "measured_on": measured["machine"],
        "target_first_token_p95": TARGET,
        "target_per_token_p50": EACH,
        "traces": {},
    }
    for name, whole in traces(options.workloads).items():
        trace = [request for request in whole if request.tokens + request.output <= CONTEXT]
        base = serviceable(service, trace)
        found: dict[str, Any] = {
            "requests": len(trace),
            "left_out": len(whole) - len(trace),
            "mean_tokens": round(statistics.fmean(request.tokens for request in trace), 1),
            "mean_output": round(statistics.fmean(request.output for request in trace), 1),
            "serviceable_rate": round(base, 4),
            "fleets": [],
        }
        for size in options.sizes:
            for load in options.loads:
                for routing in options.routings:
                    began = time.perf_counter()
                    row = simulate(service, trace, size, routing, load * base)
                    print(name, size, load, routing, row, f"{time.perf_counter() - began:.0f} s", file=sys.stderr)
                    found["fleets"].append({"replicas": size, "load": load, "routing": routing, **row})
        if not options.no_sizing:
            found["sizing"] = {routing: size_for(service, trace, routing) for routing in options.routings}
            print(name, found["sizing"], file=sys.stderr)
        result["traces"][name] = found
    return result


if __name__ == "__main__":
    main()
