"""The options of `octavo bench serve`, and its run from end to end."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli.bench.lengths import FORMS, parse_lengths
from cli.errors import BenchError, OptionError
from engine.host.logs import printable

DESCRIPTION = """\
Send requests to any OpenAI-compatible server and measure its answers.

The load is closed with --concurrency (so many requests at a time) or open
with --request-rate (each is sent when it is due, however many still run); a
trace with arrival times is replayed as it was. Latencies count from the moment
a request was due. Lengths are in tokens: N, LOW:HIGH, normal:MEAN:STD or
lognormal:MEDIAN:SIGMA.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = DESCRIPTION
    add = parser.add_argument_group("server").add_argument
    add("--url", default="http://127.0.0.1:8000", help="URL of the server, with or without /v1 [%(default)s]")
    add("--model", help="model id (default: the first one that the server lists)")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="endpoint to measure [%(default)s]")
    add("--api-key", help="API key for the server (default: first key of OCTAVO_API_KEY)")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="time limit of a request [%(default)g]")
    add("--stream", action=argparse.BooleanOptionalAction, default=True, help="stream the answers [on]")
    add("--extra-body", metavar="JSON", help="JSON object that is merged into every request body")
    add(
        "--return-token-ids",
        action=argparse.BooleanOptionalAction,
        help="request token ids, to count the tokens of each event exactly [on for Octavo and vLLM]",
    )
    add = parser.add_argument_group("load").add_argument
    add("--num-requests", type=int, metavar="N", help="number of measured requests [100; no limit with --duration]")
    add("--duration", type=float, metavar="SECONDS", help="stop sending after this time; running requests finish")
    add_concurrency(add, "closed load: requests at a time [8]; several, as 1,2,4,8, are measured one after the other")
    add("--request-rate", metavar="R", help="open load: average requests per second; inf sends all at once")
    add(
        "--burstiness",
        type=float,
        metavar="X",
        help="distribution of arrivals: 1 is Poisson, below 1 burstier, above 1 steadier [1]",
    )
    add("--warmup", type=int, default=1, metavar="N", help="unmeasured requests before the run [%(default)s]")
    add("--seed", type=int, default=0, metavar="N", help="seed of arrivals, lengths and prompts [%(default)s]")
    add = parser.add_argument_group("requests").add_argument
    add("--input-len", metavar="LEN", help=f"length of prompts in tokens: {FORMS} [128]")
    add("--output-len", metavar="LEN", help="length of answers, in the same forms [128]")
    add("--prompts", choices=("ids", "text"), help="random token ids or random words [ids; for chat: text]")
    add("--vocab-size", type=int, metavar="N", help="upper bound of random token ids (default: derived from /tokenize)")
    add(
        "--prefix-len", type=int, default=0, metavar="N", help="length of a shared prefix of the prompts, in tokens [0]"
    )
    add("--num-prefixes", type=int, metavar="N", help="number of shared prefixes; each request takes one at random [1]")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="always generate the full output length [on, except for text prompts]",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="trace to replay: JSON lines in Mooncake's format or with prompts, or Azure's CSV",
    )
    add("--trace-speed", type=float, metavar="X", help="speed up the arrivals of the trace by this factor [1]")
    add("--trace-scale", type=float, metavar="X", help="multiply the lengths of the trace by this factor [1]")
    add("--max-input-len", type=int, metavar="N", help="limit for the length of generated prompts")
    add("--max-output-len", type=int, metavar="N", help="limit for the length of answers")
    add = parser.add_argument_group("report").add_argument
    add(
        "--slo-ttft",
        type=float,
        metavar="MS",
        help="limit for the time to first token; requests within the limits count as goodput",
    )
    add("--slo-tpot", type=float, metavar="MS", help="limit for the time per output token")
    add("--json", type=Path, metavar="FILE", help="write all results and settings to this file")
    add("--save-requests", action="store_true", help="with --json: include a row per request")
    add_plot(add)
    add("--quiet", action="store_true", help="do not show a progress bar")


def add_concurrency(add: Callable[..., Any], about: str) -> None:
    """Add --concurrency, which takes one level or several."""
    add("--concurrency", type=_levels, metavar="N,N", help=about)


def add_plot(add: Callable[..., Any]) -> None:
    """Add --plot."""
    add("--plot", type=Path, metavar="FOLDER", help="write PNG plots to this folder: latency distributions, and "
        "throughput by concurrency if there are several levels; needs matplotlib")  # fmt: skip


def _levels(text: str) -> tuple[int, ...]:
    try:
        levels = tuple(int(part) for part in text.split(","))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1 or len(set(levels)) < len(levels):
        rule = "must be an integer of at least 1, or several different ones as 1,2,4,8"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
    return levels


def run(args: argparse.Namespace) -> int:
    """Check the options, measure, report; returns the exit status: 0 measured, 1 it could not or no request
    succeeded, 2 wrong options, 130 stopped by Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        check(args)
        from cli.bench.session import measure  # httptools and uvloop are not needed for a wrong option

        return measure(args)
    except OptionError as problem:
        print(f"octavo bench serve: {printable(str(problem))} (see octavo bench serve --help)", file=sys.stderr)
        return 2
    except BenchError as problem:
        print(f"octavo bench serve: {printable(str(problem))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("octavo bench serve: stopped before anything was measured.", file=sys.stderr)
        return 130


def check(args: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other options, and refuse what contradicts itself.

    Raises:
        OptionError: names the option, its value and what is allowed.
    """
    _contradictions(args)
    for name in ("num_requests", "vocab_size", "num_prefixes", "max_input_len", "max_output_len"):
        _at_least(args, name, 1)
    for name in ("warmup", "prefix_len"):
        _at_least(args, name, 0)
    for name in ("timeout", "duration", "burstiness", "trace_speed", "trace_scale", "slo_ttft", "slo_tpot"):
        value = getattr(args, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise OptionError(f"{_flag(name)} must be a number above 0, got {value}.")
    if args.request_rate is not None:
        args.request_rate = _rate(args.request_rate)
    if args.duration is not None and args.request_rate == math.inf:
        raise OptionError(
            "--request-rate inf sends all requests at once, so --duration has no effect. Use --num-requests."
        )
    args.extra_body = _extra_body(args.extra_body)
    if args.api_key is None:
        args.api_key = os.environ.get("OCTAVO_API_KEY", "").split(",")[0].strip() or None
    args.prompts = args.prompts or ("text" if args.endpoint == "chat" else "ids")
    args.input_len = parse_lengths(args.input_len or "128", "--input-len")
    args.output_len = parse_lengths(args.output_len or "128", "--output-len")
    check_files(args)


def check_files(args: argparse.Namespace) -> None:
    """Check that the result files can be written at the end.

    Raises:
        OptionError: it cannot.
    """
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise OptionError(f"--json {args.json}: the folder does not exist.")
    if args.plot is not None:
        from cli.bench.plots import check_plots

        check_plots(args.plot)


def _contradictions(args: argparse.Namespace) -> None:
    given = {name for name, value in vars(args).items() if value is not None and value is not False}
    for one, other, why in (
        ("concurrency", "request_rate", "the load is closed or open"),
        ("trace", "input_len", "the trace says the input lengths; see --trace-scale and --max-input-len"),
        ("trace", "num_prefixes", "the trace says what is shared"),
    ):
        if one in given and other in given:
            raise OptionError(f"{_flag(one)} and {_flag(other)} exclude each other: {why}.")
    for one, other in (
        ("burstiness", "request_rate"),
        ("trace_speed", "trace"),
        ("trace_scale", "trace"),
        ("save_requests", "json"),
    ):
        if one in given and other not in given:
            raise OptionError(f"{_flag(one)} needs {_flag(other)}.")
    if "trace" in given and args.prefix_len:
        raise OptionError("--trace and --prefix-len exclude each other: the trace defines the shared prefixes.")
    if "num_prefixes" in given and not args.prefix_len:
        raise OptionError("--num-prefixes needs --prefix-len.")
    if "trace_speed" in given and ("concurrency" in given or "request_rate" in given):
        raise OptionError("--trace-speed replays the trace's arrivals, which --concurrency and --request-rate replace.")
    if args.endpoint == "chat" and args.prompts == "ids":
        raise OptionError("--prompts ids needs --endpoint completions: chat messages are texts.")
    if args.prompts == "text" and "vocab_size" in given:
        raise OptionError("--vocab-size needs --prompts ids.")
    if not args.stream:
        for name in ("slo_ttft", "slo_tpot"):
            if name in given:
                raise OptionError(f"{_flag(name)} needs --stream, which measures the time of each token.")


def _extra_body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as problem:
        raise OptionError(f"--extra-body is not JSON: {problem}.") from None
    if not isinstance(value, dict):
        raise OptionError(f"--extra-body must be a JSON object, got {text!r}.")
    if "stream" in value:
        raise OptionError("--extra-body must not hold stream; use --stream or --no-stream.")
    return value


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise OptionError(f"--request-rate must be a number above 0 or inf, got {text!r}.")
    return rate


def _at_least(args: argparse.Namespace, name: str, low: int) -> None:
    value = getattr(args, name)
    if value is not None and value < low:
        raise OptionError(f"{_flag(name)} must be at least {low}, got {value}.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
