"""One benchmark: ask the server what it is, warm up, send, report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from cli.bench.client import Client, Target, TransportError, error_message
from cli.bench.lengths import Lengths
from cli.bench.load import Load, arrivals
from cli.bench.outcome import progress, report
from cli.bench.prompts import PromptMaker, find_text_prompts, find_token_prompts
from cli.bench.report import Facts, Run
from cli.bench.trace import TraceRow, read_trace
from cli.bench.workload import Job, Workload
from cli.errors import BenchError, OptionError

_DEFAULT_REQUESTS = 100
_DEFAULT_CONCURRENCY = 8
_TELL_IDS = ("octavo", "vllm")  # owners of their models; other servers may refuse a field of theirs
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class _Server:
    model: str
    version: str | None
    max_model_len: int | None
    max_encoder_len: int | None = None
    tells_ids: bool = False  # where it is asked to, of which tokens an event is made

    def holds(self, prompt: int, answer: int) -> bool:
        """The model has room for these tokens, as far as is known; an encoder's do not take the answer's."""
        if self.max_model_len is None:
            return True
        if self.max_encoder_len is None:
            return prompt + answer <= self.max_model_len
        return prompt <= self.max_encoder_len and answer < self.max_model_len  # which begins with a start token

    @property
    def room(self) -> str:
        """The model's limits in words, for errors."""
        context = f"the server's context of {self.max_model_len} tokens (max_model_len)"
        return context if self.max_encoder_len is None else f"{context}, or its encoder's of {self.max_encoder_len}"


def measure(args: argparse.Namespace) -> int:
    """Run what the checked options ask for; returns the exit status.

    Raises:
        BenchError: nothing could be measured.
    """
    trace = None if args.trace is None else read_trace(args.trace, args.num_requests)
    target = Target.parse(args.url, args.api_key)
    _raise_file_limit()
    try:
        import uvloop
    except ImportError:  # it does not exist for Windows
        return asyncio.run(_measure(args, target, trace))
    return uvloop.run(_measure(args, target, trace))


async def _measure(args: argparse.Namespace, target: Target, trace: list[TraceRow] | None) -> int:
    client = Client(target)
    try:
        async with asyncio.timeout(args.timeout):
            server = await _ask(client, args)
            if args.return_token_ids is None:
                args.return_token_ids = args.stream and server.tells_ids
            workload, notes = await _workload(client, args, server.model, trace)
    except TimeoutError:
        raise BenchError(f"{args.url} did not answer within {args.timeout:g} seconds (--timeout).") from None
    except TransportError as problem:
        raise BenchError(f"{problem}. Is the server running there? (--url; octavo serve starts one)") from None
    count = _count(args, trace)
    _check_context(args, workload, server, count)
    path = _PATHS[args.endpoint]
    levels = args.concurrency or (None,)
    runs: list[Run] = []
    stopped = False
    for number, level in enumerate(levels):
        part = argparse.Namespace(**vars(args) | {"concurrency": level})
        if not number:
            await _warm_up(client, path, part, workload)
        total = count if args.duration is None else None
        with progress(total, level if len(levels) > 1 else None, quiet=args.quiet) as on_end:
            load = Load(client, path, args.timeout, on_end)
            cpu = time.process_time()
            # Each level has prompts of its own: what one has left in the cache must not help another.
            jobs = workload.jobs(count, name=f"run {level}" if len(levels) > 1 else "run")
            stopped = await _until_interrupted(_send(load, part, workload, jobs))
            cpu = time.process_time() - cpu
        runs.append(Run(level, load.records, _facts(part, workload, count, server, notes, cpu)))
        if stopped:
            print("Stopped; this is what was measured until then.", file=sys.stderr)
            break
    client.close()
    status = report(args, runs)
    return 130 if stopped else status


def _facts(
    args: argparse.Namespace, workload: Workload, count: int | None, server: _Server, notes: list[str], cpu: float
) -> Facts:
    return Facts(
        settings=_settings(args, workload, count),
        server={
            "url": args.url,
            "model": server.model,
            "version": server.version,
            "max_model_len": server.max_model_len,
        },
        client_cpu_seconds=cpu,
        loop=type(asyncio.get_running_loop()).__module__.partition(".")[0],
        notes=notes,
    )


async def _ask(client: Client, args: argparse.Namespace) -> _Server:
    status, answer = await client.json("GET", "/v1/models")
    if status in (401, 403):
        raise BenchError(f"the server requires an API key (status {status}: {error_message(answer)}). Set --api-key.")
    cards: list[dict[str, Any]] = []
    if status == 200 and isinstance(answer, dict) and isinstance(answer.get("data"), list):
        cards = [card for card in answer["data"] if isinstance(card, dict) and isinstance(card.get("id"), str)]
    if args.model is None and not cards:
        raise BenchError(
            f"{args.url}/v1/models lists no model (status {status}: {error_message(answer)[:120]}). "
            "Check --url, or set --model."
        )
    model = args.model or cards[0]["id"]
    card = next((card for card in cards if card["id"] == model), None)
    if cards and card is None:
        raise BenchError(f"--model {model}: the server has {', '.join(card['id'] for card in cards[:8])}.")
    length = card.get("max_model_len") if card else None
    status, answer = await client.json("GET", "/version")
    version = answer.get("version") if status == 200 and isinstance(answer, dict) else None
    encoder = card.get("max_encoder_len") if card else None
    return _Server(
        model,
        version,
        length if isinstance(length, int) else None,
        encoder if isinstance(encoder, int) else None,
        card is not None and card.get("owned_by") in _TELL_IDS,
    )


async def _workload(
    client: Client, args: argparse.Namespace, model: str, trace: list[TraceRow] | None
) -> tuple[Workload, list[str]]:
    if trace is not None and args.endpoint == "completions" and any(row.messages is not None for row in trace):
        raise OptionError(f"--trace {args.trace} has messages, which need --endpoint chat.")
    if trace is not None and args.endpoint == "chat" and any(isinstance(row.prompt, list) for row in trace):
        raise OptionError(f"--trace {args.trace} has token ids, which need --endpoint completions.")
    notes: list[str] = []
    maker: PromptMaker
    if args.prompts == "ids":
        maker = await find_token_prompts(client, model, args.vocab_size)
    else:
        maker, note = await find_text_prompts(client, model)
        notes += [note] if note else []
    # Real texts without a wanted length end where the model ends them.
    natural = trace is not None and any(row.output_len is None and row.input_len is None for row in trace)
    return Workload(
        model=model,
        chat=args.endpoint == "chat",
        maker=maker,
        input_len=args.input_len,
        output_len=args.output_len,
        prefix_len=args.prefix_len,
        num_prefixes=args.num_prefixes or 1,
        trace=trace,
        scale=args.trace_scale or 1.0,
        max_input_len=args.max_input_len,
        max_output_len=args.max_output_len,
        stream=args.stream,
        ignore_eos=not natural if args.ignore_eos is None else args.ignore_eos,
        return_token_ids=args.return_token_ids,
        extra_body=args.extra_body,
        seed=args.seed,
    ), notes


def _count(args: argparse.Namespace, trace: list[TraceRow] | None) -> int | None:
    """The number of requests to send; None: as many as the duration allows."""
    if trace is not None:
        if args.num_requests is not None and args.num_requests > len(trace):
            raise OptionError(f"--num-requests is {args.num_requests}, but {args.trace} holds {len(trace)} requests.")
        return len(trace)
    if args.num_requests is None and args.duration is None:
        return _DEFAULT_REQUESTS
    number: int | None = args.num_requests
    return number


def _check_context(args: argparse.Namespace, workload: Workload, server: _Server, count: int | None) -> None:
    """Refuse requests of which the server will refuse the first or many, where that is known."""
    if args.prompts != "ids":
        return
    if workload.trace is not None:
        lengths = list(workload.lengths(count))
        beyond = [sum(pair) for pair in lengths if not server.holds(*pair)]
        if beyond:
            raise BenchError(
                f"{len(beyond)} of {len(lengths)} requests of the trace are longer than {server.room}, the "
                f"longest has {max(beyond)}. Use --trace-scale, --max-input-len and --max-output-len."
            )
        return
    prompt = _least(workload.input_len, args.max_input_len)
    answer = _least(workload.output_len, args.max_output_len)
    if prompt is not None and answer is not None and not server.holds(args.prefix_len + prompt, answer):
        raise BenchError(
            f"prefix, input and output are up to {args.prefix_len + prompt + answer} tokens, more than {server.room}. "
            "Lower --prefix-len, --input-len or --output-len."
        )


def _least(lengths: Lengths, limit: int | None) -> int | None:
    known = [value for value in (lengths.highest, limit) if value is not None]
    return min(known, default=None)


async def _warm_up(client: Client, path: str, args: argparse.Namespace, workload: Workload) -> None:
    if not args.warmup:
        return
    load = Load(client, path, args.timeout)
    await load.closed(workload.warmup(args.warmup), min(args.warmup, args.concurrency or _DEFAULT_CONCURRENCY))
    failures = [record.failure for record in load.records if record.failure is not None]
    if len(failures) == len(load.records):
        raise BenchError(f"the warm-up failed ({failures[0].kind}): {failures[0].message}")


async def _send(load: Load, args: argparse.Namespace, workload: Workload, jobs: Iterator[Job]) -> None:
    replay = args.trace is not None and workload.trace is not None and workload.trace[0].arrival is not None
    if args.request_rate is not None:
        dues = arrivals(args.request_rate, args.burstiness or 1.0, args.seed)
        await load.open(_in_time(zip(dues, jobs, strict=False), args.duration))
    elif replay and args.concurrency is None:
        speed = args.trace_speed or 1.0
        due = (((job.arrival or 0.0) / speed, job) for job in jobs)
        await load.open(_in_time(due, args.duration))
    else:
        await load.closed(jobs, args.concurrency or _DEFAULT_CONCURRENCY, args.duration)


def _in_time(jobs: Iterator[tuple[float, Job]], seconds: float | None) -> Iterator[tuple[float, Job]]:
    return jobs if seconds is None else takewhile(lambda item: item[0] < seconds, jobs)


async def _until_interrupted(work: Any) -> bool:
    """Run `work`, ending it at Ctrl-C or SIGTERM; whether that happened. A second signal ends the process."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_DFL)

    with contextlib.suppress(NotImplementedError):  # event loops of Windows: Ctrl-C ends without a report
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    if not stopped:
        with contextlib.suppress(NotImplementedError):
            for signum in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(signum)
    return stopped


def _settings(args: argparse.Namespace, workload: Workload, count: int | None) -> dict[str, Any]:
    """The options as they were used; the key is not written down."""
    settings: dict[str, Any] = {}
    for name, value in sorted(vars(args).items()):
        if name in ("api_key", "json", "plot", "no_color"):
            continue
        if isinstance(value, Lengths):
            value = value.text
        settings[name] = value if isinstance(value, str | int | float | bool | dict | None) else str(value)
    if settings["request_rate"] == float("inf"):
        settings["request_rate"] = "inf"  # JSON has no infinity
    if workload.trace is not None:
        settings["input_len"] = None
    return settings | {"num_requests": count, "ignore_eos": workload.ignore_eos, "model": workload.model}


def _raise_file_limit() -> None:
    """Every request that runs holds a connection."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
