"""`octavo serve`: the service."""

from __future__ import annotations

from cli import version
from cli.settings import SettingsParser, load, settings_parser
from cli.terminal.style import say


def parser() -> SettingsParser:
    return settings_parser("serve")


def run(arguments: list[str]) -> int:
    """Serve until it is stopped."""
    made = parser()
    loaded, _ = load(made, arguments)
    from engine import ConfigError, OctavoError
    from server.door.listening import StartupError
    from server.models.declared import declare
    from server.run import serve

    try:
        several = declare(loaded.settings, loaded.named)
    except ConfigError as problem:
        made.error(str(problem))
    try:
        return serve(loaded.engine, loaded.settings, version(), notes=loaded.notes, several=several)
    except (OctavoError, StartupError) as problem:
        paragraph = " ".join(line.strip() for line in str(problem).splitlines())  # may have several lines
        say("octavo", f"cannot start: {paragraph}")
        return 1
