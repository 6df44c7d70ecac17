"""`octavo bench offline`: the engine in this process, under a closed load."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli import version
from cli.bench.cli import add_concurrency, add_plot, check_files
from cli.bench.lengths import FORMS, Lengths, parse_lengths
from cli.bench.outcome import progress, report
from cli.bench.prompts import TokenPrompts
from cli.bench.record import Failure, Record
from cli.bench.report import Facts, Run
from cli.errors import BenchError, OptionError
from cli.settings import SettingsParser
from cli.terminal.style import say
from engine import ConfigError, OctavoError, SamplingParams
from server.config.settings import DEMO_MODEL, ENGINE_FIELDS

if TYPE_CHECKING:
    from engine import Engine

PROG = "octavo bench offline"
DESCRIPTION = """\
Measure the engine in this process, without a server or HTTP. Requests of random tokens run at a fixed concurrency: when
one ends, the next begins. Answers are greedy and have full length. Without MODEL, the bundled model is measured.

  octavo bench offline --concurrency 1,2,4,8,16 --plot plots
  octavo bench offline path/to/model --dtype bfloat16 --input-len 256 --output-len 64:128
"""
_LEVELS = (1, 2, 4, 8, 16, 32)


def offline_parser() -> SettingsParser:
    """The engine's settings, and those of the measurement."""
    made = SettingsParser(PROG, DESCRIPTION, names={*ENGINE_FIELDS, "config", "demo"})
    add = made.add_argument_group("load").add_argument
    add_concurrency(
        add, f"concurrent requests; several values are measured one after the other [{','.join(map(str, _LEVELS))}]"
    )
    add(
        "--num-requests",
        type=int,
        metavar="N",
        help="measured requests per concurrency level [4 times the level, at least 8]",
    )
    add("--input-len", default="128", metavar="LEN", help=f"length of prompts in tokens: {FORMS} [128]")
    add("--output-len", default="64", metavar="LEN", help="length of answers, in the same forms [64]")
    add("--warmup", type=int, default=2, metavar="N", help="unmeasured requests before each run [2]")
    add = made.add_argument_group("report").add_argument
    add("--json", type=Path, metavar="FILE", help="write all results and settings to this file")
    add("--save-requests", action="store_true", help="with --json: include a row per request")
    add_plot(add)
    add("--quiet", action="store_true", help="do not show a progress bar")
    return made


def run(arguments: list[str]) -> int:
    """Measure; returns the exit status: 0 measured, 1 it could not, 2 wrong options, 130 stopped by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = offline_parser()
    args = parser.parse_args(arguments)
    try:
        loaded = parser.load(args)
        lengths = _check(args)
    except (ConfigError, OptionError) as problem:
        parser.error(str(problem))
    try:
        shows = loaded.engine.show_progress is not False and sys.stderr.isatty() and not args.quiet
        return _measure(args, replace(loaded.engine, show_progress=shows), *lengths)
    except (BenchError, OctavoError) as problem:
        say(PROG, " ".join(str(problem).split()))
        return 1
    except KeyboardInterrupt:
        say(PROG, "stopped before anything was measured.")
        return 130


def _check(args: argparse.Namespace) -> tuple[Lengths, Lengths]:
    for name, low in (("num_requests", 1), ("warmup", 0)):
        value = getattr(args, name)
        if value is not None and value < low:
            raise OptionError(f"--{name.replace('_', '-')} must be at least {low}, got {value}.")
    if args.save_requests and args.json is None:
        raise OptionError("--save-requests needs --json.")
    check_files(args)
    return parse_lengths(args.input_len, "--input-len"), parse_lengths(args.output_len, "--output-len")


def _measure(args: argparse.Namespace, config: Any, input_len: Lengths, output_len: Lengths) -> int:
    from engine import Engine

    engine = Engine(replace(config, skip_tokenizer_init=True))  # prompts are token ids
    try:
        load = _Load(engine, input_len, output_len, seed=config.seed or 0)
        load.check()
        levels = args.concurrency or tuple(level for level in _LEVELS if level <= engine.info.max_num_seqs)
        if args.warmup:
            load.run("warm-up", args.warmup, min(args.warmup, 2), lambda: None)
        runs: list[Run] = []
        stopped = False
        for level in levels:
            count = args.num_requests or max(8, 4 * level)
            cpu = time.process_time()
            with progress(count, level if len(levels) > 1 else None, quiet=args.quiet) as on_end:
                stopped = not load.run(f"run {level}", count, level, on_end)
            runs.append(Run(level, load.records, _facts(engine, args, level, count, time.process_time() - cpu)))
            if stopped:
                print("Stopped; this is what was measured until then.", file=sys.stderr)
                break
    finally:
        engine.close()
    status = report(args, runs)
    return 130 if stopped else status


class _Load:
    """Requests that run so many at a time.

    Attributes:
        records: of the last run.
    """

    def __init__(self, engine: Engine, input_len: Lengths, output_len: Lengths, *, seed: int):
        self._engine = engine
        self._input_len = input_len
        self._output_len = output_len
        self._seed = seed
        info = engine.info
        self._prompts = TokenPrompts(range(info.encoder_vocab_size or info.vocab_size))
        self.records: list[Record] = []

    def check(self) -> None:
        """Refuse what the model cannot do, or has no room for.

        Raises:
            BenchError: names the setting to change.
        """
        info = self._engine.info
        if "generate" not in info.tasks:
            tasks = ", ".join(info.tasks)
            raise BenchError(
                f"{info.model} does not generate text; its tasks are {tasks}. octavo bench offline needs a "
                f"generative model."
            )
        prompt, answer = self._input_len.highest, self._output_len.highest
        room, what = info.max_model_len, "prompt and answer together"
        if info.max_encoder_len is not None:
            room, what = info.max_model_len - 1, "the answer"
            if prompt is not None and prompt > info.max_encoder_len:
                raise BenchError(f"--input-len {prompt}: the encoder reads at most {info.max_encoder_len} tokens.")
            prompt = 0
        if prompt is not None and answer is not None and prompt + answer > room:
            raise BenchError(
                f"--input-len and --output-len make up to {prompt + answer} tokens, but the model has room for "
                f"{room} of {what}. Lower one of them."
            )

    def run(self, name: str, count: int, level: int, on_end: Any) -> bool:
        """Run `count` requests, `level` at a time; whether all came to their end."""
        self.records = []
        running: dict[str, Record] = {}
        jobs = self._jobs(name, count)
        try:
            while True:
                while len(running) < level and (job := next(jobs, None)) is not None:
                    self._begin(*job, running)
                if not running:
                    return True
                self._step(running, on_end)
        except KeyboardInterrupt:
            for request_id, record in running.items():
                record.failure = Failure("interrupted", "the benchmark was stopped")
                self._engine.abort_request(request_id)
            return False

    def _jobs(self, name: str, count: int) -> Iterator[tuple[str, list[int], int]]:
        for index in range(count):
            rng = random.Random(f"{self._seed} {name} {index}")
            length = self._input_len.draw(rng)
            yield f"{name} {index}", self._prompts.make(rng, length), self._output_len.draw(rng)

    def _begin(self, request_id: str, prompt: list[int], tokens: int, running: dict[str, Record]) -> None:
        params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0, num_beams=1, ignore_eos=True)
        now = time.perf_counter()
        record = Record(
            index=len(self.records), input_len=len(prompt), output_len=tokens, scheduled=now, sent=now,
            prompt_tokens=len(prompt),
        )  # fmt: skip
        self.records.append(record)
        running[request_id] = record
        self._engine.add_request(request_id, prompt, params)

    def _step(self, running: dict[str, Record], on_end: Any) -> None:
        deltas = self._engine.step_deltas()
        now = time.perf_counter()
        for delta in deltas:
            record = running[delta.request_id]
            tokens = sum(len(choice.token_ids) for choice in delta.choices)
            if tokens:
                record.times.append(now)
                record.counts.append(tokens)
            record.cached_tokens = max(record.cached_tokens or 0, delta.num_cached_tokens)
            if delta.error is not None:
                record.failure = Failure("engine", delta.error)
            if delta.finished:
                record.ended, record.completion_tokens = now, sum(record.counts)
                del running[delta.request_id]
                on_end()


def _facts(engine: Engine, args: argparse.Namespace, level: int, count: int, cpu: float) -> Facts:
    info = engine.info
    settings = {
        "concurrency": level, "num_requests": count, "input_len": args.input_len, "output_len": args.output_len,
        "warmup": args.warmup, "dtype": info.dtype, "quantization": info.quantization, "device": info.device,
        "kv_cache_dtype": info.kv_cache_dtype, "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
    }  # fmt: skip
    what = f"{info.quantization or info.dtype} on {info.device}, in this process"
    path = Path(info.model).resolve()
    name = path.name if path.is_dir() else info.model
    if path.parent == DEMO_MODEL.parent:
        name = f"the bundled model {name}"
    server = {"url": what, "model": name, "version": version(), "max_model_len": info.max_model_len}
    return Facts(settings=settings, server=server, client_cpu_seconds=cpu, loop="none", benchmark="offline")
