"""`octavo bench offline`: the engine in this process, under a closed load."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from cli import version
from cli.bench.figures import Level, Record, show
from cli.bench.lengths import FORMS, Lengths, parse_lengths
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

  octavo bench offline --concurrency 1,2,4,8,16
  octavo bench offline path/to/model --dtype bfloat16 --input-len 256 --output-len 64:128
"""
_LEVELS = (1, 2, 4, 8, 16, 32)


def offline_parser() -> SettingsParser:
    """The parser of the engine's settings and of the measurement's."""
    made = SettingsParser(PROG, DESCRIPTION, names={*ENGINE_FIELDS, "config", "demo"})
    add = made.add_argument_group("load").add_argument
    add(
        "--concurrency",
        type=_levels,
        metavar="N,N",
        help=f"concurrent requests; several values are measured one after the other [{','.join(map(str, _LEVELS))}]",
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
    add("--quiet", action="store_true", help="do not show a progress bar")
    return made


def _levels(text: str) -> tuple[int, ...]:
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1 or len(set(levels)) < len(levels):
        rule = "must be an integer of at least 1, or several different ones as 1,2,4,8"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
    return levels


def run(arguments: list[str]) -> int:
    """Measure; returns the exit status: 0 if it succeeded, 1 if it failed, 2 for wrong options, 130 if Ctrl-C stopped
    it."""
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
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise OptionError(f"--json {args.json}: the folder does not exist.")
    return parse_lengths(args.input_len, "--input-len"), parse_lengths(args.output_len, "--output-len")


def _measure(args: argparse.Namespace, config: Any, input_len: Lengths, output_len: Lengths) -> int:
    from engine import Engine

    engine = Engine(replace(config, skip_tokenizer_init=True))  # prompts are token ids
    try:
        load = _Load(engine, input_len, output_len, seed=config.seed or 0)
        load.check()
        chosen = args.concurrency or tuple(level for level in _LEVELS if level <= engine.info.max_num_seqs)
        if args.warmup:
            load.run("warm-up", args.warmup, min(args.warmup, 2), quiet=True)
        levels: list[Level] = []
        stopped = False
        for concurrency in chosen:
            count = args.num_requests or max(8, 4 * concurrency)
            cpu = time.process_time()
            stopped = not load.run(f"run {concurrency}", count, concurrency, quiet=args.quiet)
            cpu = time.process_time() - cpu
            settings = _settings(engine, args, concurrency, count)
            levels.append(Level(load.records, settings, _server(engine), cpu))
            if stopped:
                print("Stopped; these are the measurements so far.", file=sys.stderr)
                break
    finally:
        engine.close()
    status = _report(args, levels)
    return 130 if stopped else status


class _Load:
    """A load with a fixed number of requests at a time. `records`: the records of the last run."""

    def __init__(self, engine: Engine, input_len: Lengths, output_len: Lengths, *, seed: int):
        self._engine = engine
        self._input_len = input_len
        self._output_len = output_len
        self._seed = seed
        info = engine.info
        self._vocabulary = range(info.encoder_vocab_size or info.vocab_size)
        self.records: list[Record] = []

    def check(self) -> None:
        """Refuse settings that the model does not support or that need too much room. Raises BenchError: names the
        setting to change."""
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

    def run(self, name: str, count: int, concurrency: int, *, quiet: bool) -> bool:
        """Run `count` requests; returns whether all of them finished. Each level has its own prompts, so it gains
        nothing from another level's prefix cache."""
        self.records = []
        running: dict[str, Record] = {}
        jobs = self._jobs(name, count)
        hidden = quiet or not sys.stderr.isatty()
        with tqdm(total=count, desc=f"{concurrency} at a time", unit=" requests", disable=hidden, leave=False) as bar:
            try:
                while True:
                    while len(running) < concurrency and (job := next(jobs, None)) is not None:
                        self._begin(*job, running)
                    if not running:
                        return True
                    bar.update(self._step(running))
            except KeyboardInterrupt:
                for request_id, record in running.items():
                    record.failure = ("interrupted", "the benchmark was stopped")
                    self._engine.abort_request(request_id)
                return False

    def _jobs(self, name: str, count: int) -> Iterator[tuple[str, list[int], int]]:
        for index in range(count):
            rng = random.Random(f"{self._seed} {name} {index}")
            prompt = rng.choices(self._vocabulary, k=self._input_len.draw(rng))
            yield f"{name} {index}", prompt, self._output_len.draw(rng)

    def _begin(self, request_id: str, prompt: list[int], tokens: int, running: dict[str, Record]) -> None:
        params = SamplingParams(max_tokens=tokens, min_tokens=tokens, temperature=0.0, num_beams=1, ignore_eos=True)
        record = Record(prompt_tokens=len(prompt), started=time.perf_counter())
        self.records.append(record)
        running[request_id] = record
        self._engine.add_request(request_id, prompt, params)

    def _step(self, running: dict[str, Record]) -> int:
        """Run one step; returns the number of requests that it ended."""
        before = len(running)
        deltas = self._engine.step_deltas()
        now = time.perf_counter()
        for delta in deltas:
            record = running[delta.request_id]
            tokens = sum(len(choice.token_ids) for choice in delta.choices)
            if tokens:
                record.times.append(now)
                record.counts.append(tokens)
            record.cached_tokens = max(record.cached_tokens, delta.num_cached_tokens)
            if delta.error is not None:
                record.failure = ("engine", delta.error)
            if delta.finished:
                record.ended = now
                del running[delta.request_id]
        return before - len(running)


def _settings(engine: Engine, args: argparse.Namespace, concurrency: int, count: int) -> dict[str, Any]:
    info = engine.info
    return {
        "concurrency": concurrency, "num_requests": count, "input_len": args.input_len, "output_len": args.output_len,
        "warmup": args.warmup, "dtype": info.dtype, "quantization": info.quantization, "device": info.device,
        "kv_cache_dtype": info.kv_cache_dtype, "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
    }  # fmt: skip


def _server(engine: Engine) -> dict[str, Any]:
    info = engine.info
    path = Path(info.model).resolve()
    name = path.name if path.is_dir() else info.model
    if path.parent == DEMO_MODEL.parent:
        name = f"the bundled model {name}"
    place = f"{info.quantization or info.dtype} on {info.device}, in this process"
    return {"url": place, "model": name, "version": version(), "max_model_len": info.max_model_len}


def _report(args: argparse.Namespace, levels: Sequence[Level]) -> int:
    """Print the table and write --json; 1 if no request succeeded."""
    summaries = [level.summary() for level in levels]
    show(levels[0].server, summaries)
    if args.json is not None:
        documents = [
            found | ({"rows": level.rows()} if args.save_requests else {})
            for found, level in zip(summaries, levels, strict=True)
        ]
        whole = documents[0] if len(levels) == 1 else {"benchmark": "offline", "levels": documents}
        try:
            args.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        except OSError as problem:
            raise BenchError(f"--json {args.json}: {problem.strerror or problem}.") from None
        print(f"\nWritten to {args.json}.")
    return 0 if any(found["requests"]["completed"] for found in summaries) else 1
