"""`octavo config`: the settings in force."""

from __future__ import annotations

import json
from typing import Any

from cli.settings import LoadedSettings, SettingsParser, load, print_notes, settings_parser
from cli.terminal.style import print_table
from server.config.settings import shown


def parser() -> SettingsParser:
    return settings_parser("config", json=True)


def run(arguments: list[str]) -> int:
    loaded, given = load(parser(), arguments)
    print_notes(loaded)
    if given.json:
        print(as_json(loaded))
    else:
        print_table(("setting", "value", "from"), rows(loaded))
    return 0


def rows(loaded: LoadedSettings) -> list[tuple[str, str, str]]:
    """Name, value and origin of each setting."""
    return [
        (name, _text(shown(name, getattr(loaded.settings, name))), f"{origin.kind} {origin.name}".rstrip())
        for name, origin in loaded.origins.items()
    ]


def as_json(loaded: LoadedSettings) -> str:
    """An object per setting: value, source (flag, variable, file, default) and its name."""
    settings = {
        name: {"value": shown(name, getattr(loaded.settings, name)), "source": origin.kind, "name": origin.name or None}
        for name, origin in loaded.origins.items()
    }
    return json.dumps(settings, indent=2)


def _text(value: Any) -> str:
    if value is None or value in ((), ""):
        return "-"
    if isinstance(value, tuple):  # in the form of a flag's value
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, bool) else str(value)
