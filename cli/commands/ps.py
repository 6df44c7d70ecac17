"""`octavo ps`: the models of a running service."""

from __future__ import annotations

import json

from cli.talking.served import ask, models_parser, print_models
from cli.terminal.parser import OneLineParser

PROG = "octavo ps"
DESCRIPTION = """\
List the models of a running service with their states and memory.

  octavo ps
  octavo ps --url http://host:8000
"""


def parser() -> OneLineParser:
    """The server, and --json."""
    return models_parser(PROG, DESCRIPTION, name=False)


def run(arguments: list[str]) -> int:
    """List the models; returns 1 if no service answers."""
    given = parser().parse_args(arguments)
    found = ask(PROG, given, "GET", "/v1/models")
    if found is None:
        return 1
    if given.json:
        print(json.dumps(found["data"], indent=2))
    else:
        print_models(found["data"])
    return 0
