"""The cost of the HTTP service over the bare engine, in one run with alternating rounds.

The same token-id prompts with the same answer lengths go three ways, so many at a time:

    engine    `Engine.step_deltas` in this process: no text, no other process
    process   the engine in its own process, through the client that the server uses
    http      `octavo serve`, streamed, loaded by `load/`

The throughput ratio is taken round by round. CPU time per output token is given for each process, too: it holds on
a busy machine, where a ratio of throughputs does not. The time to the first token is measured on one request at
a time, the ways taking turns.

    python benchmarks/http_cost.py --model ../shared/data/stories260k/hf --random
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvloop
from load import closed
from load.client import Client, Target
from load.record import Record
from offline import ROOT, SHAPE, machine, make_checkpoint
from serving import served
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine import EngineConfig, SamplingParams, TokenInput
from engine.engine import Engine
from engine.process.client import EngineClient, start_engine

TRAINED = ROOT.parent / "shared" / "data" / "stories260k" / "hf"
WAYS = ("engine", "process", "http")


@dataclass(frozen=True)
class Shot:
    """One request of the benchmark."""

    prompt: list[int]
    output_len: int

    @property
    def params(self) -> SamplingParams:
        """The same as the body asks of the server."""
        return SamplingParams(temperature=0.0, max_tokens=self.output_len, num_beams=1, ignore_eos=True)


@dataclass
class Round:
    """One way's work: seconds, tokens, and CPU seconds by process."""

    seconds: float
    tokens: int
    cpu: dict[str, float]


def make_shots(count: int, vocab_size: int, input_len: int, output_len: int, seed: int) -> list[Shot]:
    """Random prompts, which no round has sent before."""
    rng = random.Random(seed)
    return [Shot([rng.randrange(3, vocab_size) for _ in range(input_len)], output_len) for _ in range(count)]


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of that many ids whose tokens are words, so that the server has text to make."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlu"
    words, number = [], 0
    while len(words) < vocab_size - len(alphabet):
        number += 1
        rest, word = number, ""
        while rest:
            rest, digit = divmod(rest, len(letters))
            word += letters[digit]
        if len(word) > 1:
            words.append("Ġ" + word)
    vocab = {token: index for index, token in enumerate([*alphabet, *words])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Pids of a process's children (Linux)."""
    lists = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for found in lists for child in found]


def _runs(pid: int, module: str) -> bool:
    return module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()


# ---------------------------------------------------------------- the three ways


class BareEngine:
    """`Engine.step_deltas` in this process."""

    def __init__(self, config: EngineConfig):
        self._engine = Engine(config)
        self.info = self._engine.info
        self._number = 0

    def crowd(self, shots: list[Shot], concurrency: int) -> Round:
        """Keep `concurrency` requests running until all are done."""
        engine, waiting, tokens = self._engine, iter(shots), 0
        cpu, started = time.process_time(), time.perf_counter()
        for shot in _first(waiting, concurrency):
            self._add(shot)
        while engine.has_unfinished_requests():
            for delta in engine.step_deltas():
                tokens += sum(len(choice.token_ids) for choice in delta.choices)
                if delta.finished and (shot := next(waiting, None)) is not None:
                    self._add(shot)
        return Round(time.perf_counter() - started, tokens, {"engine": time.process_time() - cpu})

    def first_token(self, shot: Shot) -> float:
        """Seconds until the first token of one request."""
        engine, first = self._engine, 0.0
        started = time.perf_counter()
        self._add(shot)
        while engine.has_unfinished_requests():
            if any(choice.token_ids for delta in engine.step_deltas() for choice in delta.choices):
                first = first or time.perf_counter() - started
        return first

    def _add(self, shot: Shot) -> None:
        self._number += 1
        self._engine.add_request(str(self._number), shot.prompt, shot.params)

    def close(self) -> None:
        """Free the model."""
        self._engine.close()


class EngineProcess:
    """The engine in its own process, without HTTP and without text."""

    def __init__(self, config: EngineConfig):
        before = set(children(os.getpid()))
        self._client: EngineClient = start_engine(config)
        (self._pid,) = set(children(os.getpid())) - before
        self._number = 0
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def crowd(self, shots: list[Shot], concurrency: int) -> Round:
        """Keep `concurrency` requests running until all are done."""
        waiting = iter(shots)

        async def work() -> int:
            return sum([len(times) for shot in waiting for times in [await self._times(shot)]])

        async def all_work() -> int:
            return sum(await asyncio.gather(*(work() for _ in range(concurrency))))

        engine, client, started = cpu_seconds(self._pid), time.process_time(), time.perf_counter()
        tokens = self._runner.run(all_work())
        seconds = time.perf_counter() - started
        cpu = {"engine": cpu_seconds(self._pid) - engine, "client": time.process_time() - client}
        return Round(seconds, tokens, cpu)

    def first_token(self, shot: Shot) -> float:
        """Seconds until the first token of one request."""
        started = time.perf_counter()
        return self._runner.run(self._times(shot))[0] - started

    async def _times(self, shot: Shot) -> list[float]:
        self._number += 1
        times: list[float] = []
        source = TokenInput(shot.prompt)
        stream: Any = self._client.generate(str(self._number), source, shot.params)
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                now = time.perf_counter()
                times += [now for choice in delta.choices for _ in choice.token_ids]
        return times

    def close(self) -> None:
        """Stop the process."""
        self._runner.run(self._client.close())
        self._runner.close()


class HttpService:
    """`octavo serve` and the load generator."""

    def __init__(self, url: str, pid: int):
        self._pid = pid
        (self._engine_pid,) = [child for child in children(pid) if _runs(child, "engine.process.main")]
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._client = Client(Target.parse(url))

    def crowd(self, shots: list[Shot], concurrency: int) -> Round:
        """Keep `concurrency` requests running until all are done."""
        pids = {"api": self._pid, "engine": self._engine_pid}
        cpu = {name: -cpu_seconds(pid) for name, pid in pids.items()}
        load, started = time.process_time(), time.perf_counter()
        records = self._runner.run(send(self._client, shots, concurrency))
        seconds = time.perf_counter() - started
        cpu = {name: cpu[name] + cpu_seconds(pid) for name, pid in pids.items()}
        cpu["load"] = time.process_time() - load
        return Round(seconds, sum(record.output_tokens for record in records), cpu)

    def first_token(self, shot: Shot) -> float:
        """Seconds until the first token of one request."""
        (record,) = self._runner.run(send(self._client, [shot], 1))
        return (record.first or 0.0) - record.sent

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        self._runner.close()


async def send(client: Client, shots: list[Shot], concurrency: int) -> list[Record]:
    """Stream them, so many at a time.

    Raises:
        RuntimeError: one of them failed.
    """
    jobs = [closed.streamed(index, shot.prompt, shot.output_len) for index, shot in enumerate(shots)]
    records = await closed.send(client, "/v1/completions", jobs, concurrency)
    for record in records:
        if record.failure is not None:
            raise RuntimeError(f"a request failed: {record.failure}")
    return records


def _first(shots: Iterator[Shot], count: int) -> list[Shot]:
    return [shot for _, shot in zip(range(count), shots, strict=False)]


@contextmanager
def serving(model: str, dtype: str, concurrency: int, log: Path) -> Iterator[HttpService]:
    """The service as a process, until the end of the block."""
    settings = {
        "OCTAVO_DTYPE": dtype,
        "OCTAVO_MAX_NUM_SEQS": str(concurrency),
        "OCTAVO_MAX_QUEUE_TIME": "0",
        "OCTAVO_ENABLE_PREFIX_CACHING": "false",
        "OCTAVO_SHOW_PROGRESS": "false",
    }
    with served([model], settings, log) as (port, process):
        service = HttpService(f"http://127.0.0.1:{port}", process)
        yield service
        service.close()


# ---------------------------------------------------------------- the measurement


def measure(model: str, name: str, dtype: str, options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """All figures of one model."""
    config = EngineConfig(
        model=model,
        dtype=dtype,  # type: ignore[arg-type]
        max_num_seqs=options.concurrency,
        enable_prefix_caching=False,
        show_progress=False,
    )
    bare, process = BareEngine(config), EngineProcess(config)
    with serving(model, dtype, options.concurrency, log) as http:
        ways: dict[str, Any] = {"engine": bare, "process": process, "http": http}
        vocab_size, sizes = bare.info.vocab_size, (options.input_len, options.output_len)
        for way in ways.values():
            way.crowd(make_shots(options.concurrency, vocab_size, options.input_len, 4, -1), options.concurrency)
        rounds: dict[str, list[Round]] = {way: [] for way in WAYS}
        for number in range(options.rounds):
            shots = make_shots(options.requests, vocab_size, *sizes, number)
            for way in _rotated(number):
                done = ways[way].crowd(shots, options.concurrency)
                if done.tokens != options.requests * options.output_len:
                    raise RuntimeError(f"{way}: {done.tokens} tokens came, not what was asked for")
                rounds[way].append(done)
                print(f"{name} round {number + 1} {way:8} {done.tokens / done.seconds:9.1f} tokens/s", flush=True)
        firsts: dict[str, list[float]] = {way: [] for way in WAYS}
        for number, shot in enumerate(make_shots(options.singles, vocab_size, options.input_len, 2, -2)):
            for way in _rotated(number):
                time.sleep(0.01)  # idle means idle
                firsts[way].append(ways[way].first_token(shot) * 1e3)
    process.close()
    bare.close()
    return {
        "model": name,
        "dtype": bare.info.dtype,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "requests": options.requests,
        "concurrency": options.concurrency,
        **figures(rounds, firsts),
    }


def _rotated(number: int) -> tuple[str, ...]:
    """Each way is first, second and last in turn."""
    start = number % len(WAYS)
    return WAYS[start:] + WAYS[:start]


def figures(rounds: dict[str, list[Round]], firsts: dict[str, list[float]]) -> dict[str, Any]:
    """Rounds and first tokens (ms) summed up."""
    speeds = {way: [done.tokens / done.seconds for done in rounds[way]] for way in WAYS}
    ratios = {way: [one / base for one, base in zip(speeds[way], speeds["engine"], strict=True)] for way in WAYS}
    added = {way: [one - base for one, base in zip(firsts[way], firsts["engine"], strict=True)] for way in WAYS}
    return {
        "tokens_per_second": {way: round(statistics.median(speeds[way]), 1) for way in WAYS},
        "throughput_ratio": {way: round(statistics.median(ratios[way]), 3) for way in WAYS},
        "throughput_ratio_rounds": {way: [round(ratio, 3) for ratio in ratios[way]] for way in WAYS},
        "cpu_us_per_token": {way: _cpu(rounds[way]) for way in WAYS},
        "first_token_ms": {way: _points(firsts[way]) for way in WAYS},
        "first_token_added_ms": {way: _points(added[way]) for way in WAYS},
    }


def _cpu(rounds: Iterable[Round]) -> dict[str, float]:
    rounds = list(rounds)
    tokens = sum(done.tokens for done in rounds)
    return {name: round(sum(done.cpu[name] for done in rounds) / tokens * 1e6, 1) for name in rounds[0].cpu}


def _points(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"p50": round(statistics.median(values), 3), "p95": round(cuts[-1], 3), "min": round(min(values), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="a folder with a tokenizer (default: stories260k, if present)")
    parser.add_argument("--random", action="store_true", help="the random 135M LLaMA as well (default without --model)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="of the random model")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--requests", type=int, default=64, help="per round")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--singles", type=int, default=30, help="requests alone, for the first token")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "http-cost.json")
    options = parser.parse_args()
    folders: list[str] = options.model or ([str(TRAINED)] if TRAINED.is_dir() else [])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        log = Path(made) / "service.log"
        todo: list[Callable[[], dict[str, Any]]] = [
            lambda folder=folder: measure(folder, _name(folder), "auto", options, log) for folder in folders
        ]
        if options.random or not options.model:
            folder = Path(made) / "random-135m"
            make_checkpoint(folder, getattr(torch, options.dtype))
            make_tokenizer(folder, SHAPE["vocab_size"])
            todo.append(lambda: measure(str(folder), folder.name, options.dtype, options, log))
        for work in todo:
            rows.append(work())
            print(json.dumps(rows[-1], indent=2), flush=True)
    load = os.getloadavg()
    result = {"benchmark": "http-cost", "machine": machine() | {"load_average": load}, "results": rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {options.output}")


def _name(folder: str) -> str:
    path = Path(folder).resolve()
    return path.parent.name if path.name == "hf" else path.name


if __name__ == "__main__":
    main()
