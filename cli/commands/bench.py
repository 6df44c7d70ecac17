"""`octavo bench KIND`: measurements."""

from __future__ import annotations

from cli.commands import COMMANDS
from cli.terminal.parser import OneLineParser
from server.config.wording import did_you_mean

KINDS = dict(COMMANDS["bench"].kinds)


def parser(kind: str = "") -> OneLineParser:
    """The parser of one kind, or of the command that has them."""
    if kind == "serve":
        from cli.bench.cli import add_arguments

        made = OneLineParser(prog="octavo bench serve", usage="octavo bench serve [flags]")
        add_arguments(made)
        return made
    if kind == "offline":
        from cli.bench.offline import offline_parser

        return offline_parser()
    made = OneLineParser(
        prog="octavo bench",
        usage=f"octavo bench {'|'.join(KINDS)} [flags]",
        description="Measure latency and throughput. octavo bench KIND --help shows the flags.",
    )
    kinds = made.add_subparsers(metavar="KIND")
    for name, about in KINDS.items():
        kinds.add_parser(name, help=about, add_help=False)
    return made


def run(arguments: list[str]) -> int:
    """Measure; see each kind's own `run` for the exit status."""
    kind = arguments[0] if arguments else ""
    if kind == "serve":
        from cli.bench.cli import run as run_serve

        return run_serve(parser("serve").parse_args(arguments[1:]))
    if kind == "offline":
        from cli.bench.offline import run as run_offline

        return run_offline(arguments[1:])
    overview = parser()
    if kind in ("-h", "--help"):
        overview.print_help()
        return 0
    kinds = " and ".join(KINDS)
    if not kind:
        overview.error(f"choose a kind: {kinds}")
    if kind.startswith("-"):
        overview.error(
            f"{kind.partition('=')[0]} must come after the kind: octavo bench serve, or octavo bench offline"
        )
    near = did_you_mean(kind, KINDS) or f"; there are {kinds}"
    overview.error(f"unknown kind {kind!r}{near}")
