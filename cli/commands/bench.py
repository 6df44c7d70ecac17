"""`octavo bench KIND`: measurements."""

from __future__ import annotations

import argparse

from cli.commands import COMMANDS
from cli.terminal.parser import OneLineParser
from cli.terminal.style import say
from server.config.wording import did_you_mean

KINDS = dict(COMMANDS["bench"].kinds)


def parser(kind: str = "") -> OneLineParser:
    if kind == "offline":
        from cli.bench.offline import offline_parser

        return offline_parser()
    made = OneLineParser(
        prog="octavo bench",
        usage=f"octavo bench {'|'.join(KINDS)} [flags]",
        description="Measure latency and throughput of the engine. octavo bench offline --help shows the flags. "
        "guidellm and aiperf measure servers: see docs/benchmarking.md.",
    )
    kinds = made.add_subparsers(metavar="KIND")
    for name, about in KINDS.items():
        kinds.add_parser(name, help=about, add_help=False)
    return made


def run(arguments: list[str]) -> int:
    """Measure; each kind's `run` describes the exit status."""
    kind = arguments[0] if arguments else ""
    if kind == "offline":
        from cli.bench.offline import run as run_offline

        return run_offline(arguments[1:])
    if kind == "serve":
        say("octavo bench serve", f"guidellm replaces this command. Run: {_guidellm(arguments[1:])}")
        return 2
    overview = parser()
    if kind in ("-h", "--help"):
        overview.print_help()
        return 0
    if not kind:
        overview.error(f"choose a kind: {', '.join(KINDS)}")
    if kind.startswith("-"):
        overview.error(f"{kind.partition('=')[0]} must come after the kind: octavo bench offline")
    near = did_you_mean(kind, KINDS) or f"; the only kind is {', '.join(KINDS)}"
    overview.error(f"unknown kind {kind!r}{near}")


def _guidellm(arguments: list[str]) -> str:
    """A command that loads the same server, with synthetic prompts."""
    old = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    old.add_argument("--url", nargs="?", default="http://127.0.0.1:8000", const="URL")
    url = old.parse_known_args(arguments)[0].url.rstrip("/").removesuffix("/v1")
    return (
        f"guidellm run --backend kind=openai_http,target={url} --profile kind=concurrent,streams=8 --constraint "
        "kind=max_requests,count=100 --data kind=synthetic_text,prompt_tokens=128,output_tokens=128 --tokenizer "
        "kind=huggingface_auto,model=MODEL (see docs/benchmarking.md)"
    )
