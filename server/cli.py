"""The command line: `octavo serve` with a flag per setting.

Heavy imports wait until the arguments are known to need them, and until signals are handled.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse


def version() -> str:
    """The installed version of Octavo."""
    from importlib import metadata

    try:
        return metadata.version("octavo")
    except metadata.PackageNotFoundError:
        return "unknown (not installed)"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 served and stopped, 1 could not start, 2 wrong settings."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"octavo {version()}")
        return 0
    if argv is None:  # the process is ours; once it serves, other handlers take over
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, _stop_early)
    return _serve(arguments)


def _stop_early(signum: int, frame: FrameType | None) -> NoReturn:
    print("octavo: stopped before it served.", file=sys.stderr)
    raise SystemExit(0)


def _serve(arguments: list[str]) -> int:
    from engine import ConfigError, EngineConfig, OctavoError
    from server.run import DEMO_MODEL, StartupError, serve
    from server.settings import OneLineParser, ServerSettings, build

    given = make_parser().parse_args(arguments)
    try:
        settings = build(ServerSettings, given, os.environ)
        config = build(EngineConfig, given, os.environ, model=str(DEMO_MODEL))
    except ConfigError as problem:
        OneLineParser(prog="octavo serve").error(str(problem).rstrip("."))
    try:
        return serve(config, settings, version())
    except (OctavoError, StartupError) as problem:
        print(f"octavo: cannot start: {problem}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """The command line: `octavo serve` with a flag per setting."""
    from engine import EngineConfig
    from server.settings import OneLineParser, ServerSettings, add_flags

    parser = OneLineParser(prog="octavo", description="Serves transformer models over HTTP.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"octavo {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "serve",
        help="serve a model over the OpenAI API",
        description="Serves a model over the OpenAI API. Without MODEL, the bundled one (untrained: noise).",
        allow_abbrev=False,
    )
    add_flags(command, ServerSettings, "service")
    add_flags(command, EngineConfig, "engine", positional="model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
