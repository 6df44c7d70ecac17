"""`octavo load`: loads a model of a running service."""

from __future__ import annotations

import json

from cli.talking.served import ask, models_parser, print_models
from cli.terminal.parser import OneLineParser

PROG = "octavo load"
DESCRIPTION = """\
Load a model of a running service that serves several, and wait until it can answer.

  octavo load chat
"""


def parser() -> OneLineParser:
    """The model, the server, and --json."""
    return models_parser(PROG, DESCRIPTION, name=True)


def run(arguments: list[str]) -> int:
    """Load the model; returns 1 if that fails."""
    given = parser().parse_args(arguments)
    card = ask(PROG, given, "POST", "/v1/models/load", {"model": given.name})
    if card is None:
        return 1
    if given.json:
        print(json.dumps(card, indent=2))
    else:
        print_models([card])
    return 0
