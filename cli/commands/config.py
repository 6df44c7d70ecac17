"""`octavo config`: the settings in force."""

from __future__ import annotations

from cli.commands.settings import load, print_notes, settings_parser
from cli.settings import SettingsParser
from cli.show import as_json, rows
from cli.terminal.style import print_table


def parser() -> SettingsParser:
    """All settings, and --json."""
    return settings_parser("config", json=True)


def run(arguments: list[str]) -> int:
    """Show them."""
    loaded, given = load(parser(), arguments)
    print_notes(loaded)
    if given.json:
        print(as_json(loaded))
    else:
        print_table(("setting", "value", "from"), rows(loaded))
    return 0
