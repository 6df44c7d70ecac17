"""What the commands that take all settings have in common."""

from __future__ import annotations

import sys
from typing import Any

from cli.commands import COMMANDS
from cli.settings import Loaded, SettingsParser
from engine import ConfigError


def settings_parser(command: str, *, json: bool = False) -> SettingsParser:
    """The parser of a command whose flags are the settings, and --json where it prints something."""
    about = COMMANDS[command].about
    parser = SettingsParser(f"octavo {command}", f"{about[0].upper()}{about[1:]}.")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def load(parser: SettingsParser, arguments: list[str]) -> tuple[Loaded, Any]:
    """The settings and what else was given; ends the process with status 2 and one line if something is wrong."""
    given = parser.parse_args(arguments)
    try:
        return parser.load(given), given
    except ConfigError as problem:
        parser.error(str(problem))


def print_notes(loaded: Loaded) -> None:
    """What the variables say that sets nothing, on stderr."""
    for note in loaded.notes:
        print(f"octavo: {note}", file=sys.stderr)
