"""The models of a running service: the flags that find it, and their states as a table."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from cli.errors import TalkError
from cli.talking.options import add_server, default_key, default_url
from cli.talking.wire import ServerPlace, Wire
from cli.terminal.parser import OneLineParser
from cli.terminal.style import print_table, say

_MIB = 2**20


def models_parser(prog: str, about: str, *, name: bool) -> OneLineParser:
    """The parser of a command about a service's models. `name`: whether it takes a model's name."""
    made = OneLineParser(prog=prog, usage=f"{prog} {'NAME ' * name}[flags]", description=about)
    if name:
        made.add_argument("name", metavar="NAME", help="name or alias of the model")
    add_server(made)
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def ask(prog: str, given: argparse.Namespace, method: str, path: str, body: Any = None) -> Any:
    """The service's answer; None if there is none, which has been reported."""
    try:
        wire = Wire(ServerPlace.parse(given.url or default_url()), given.api_key or default_key(), given.timeout)
        return wire.json(method, path, body)
    except TalkError as problem:
        say(prog, str(problem))
        return None


def change(prog: str, given: argparse.Namespace, path: str) -> int:
    """Load or unload the model that a command names and print its state; returns 1 if that fails."""
    card = ask(prog, given, "POST", path, {"model": given.name})
    if card is None:
        return 1
    if given.json:
        print(json.dumps(card, indent=2))
    else:
        print_models([card])
    return 0


def print_models(cards: list[dict[str, Any]]) -> None:
    rows = [
        (
            str(card.get("id", "")),
            _state(card),
            "-" if card.get("memory") is None else f"{card['memory'] / _MIB:.0f} MiB",
            str(card.get("running_requests", "-")),
            _until(card),
            ", ".join(card.get("tasks") or ()) or "-",
        )
        for card in cards
    ]
    print_table(("model", "state", "memory", "requests", "unloads", "tasks"), rows)
    for card in cards:
        if card.get("reason"):
            print(f"{card.get('id')}: {card['reason']}")


def _state(card: dict[str, Any]) -> str:
    state = str(card.get("state", "loaded"))  # a service with one model does not report it
    return state if card.get("percent") is None else f"{state} {card['percent']}%"


def _until(card: dict[str, Any]) -> str:
    if card.get("expires_at") is None:
        return "-"
    return f"in {max(card['expires_at'] - time.time(), 0.0):.0f} s"
