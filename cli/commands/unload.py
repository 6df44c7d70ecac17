"""`octavo unload`: unloads a model of a running service."""

from __future__ import annotations

from cli.talking.served import change, models_parser
from cli.terminal.parser import OneLineParser

PROG = "octavo unload"
DESCRIPTION = """\
Unload a model of a running service that serves several. The next request to it loads it again.

  octavo unload chat
"""


def parser() -> OneLineParser:
    """The model, the server, and --json."""
    return models_parser(PROG, DESCRIPTION, name=True)


def run(arguments: list[str]) -> int:
    """Unload the model; returns 1 if that fails."""
    return change(PROG, parser().parse_args(arguments), "/v1/models/unload")
