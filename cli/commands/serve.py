"""`octavo serve`: the service."""

from __future__ import annotations

from cli import version
from cli.settings import SettingsParser, load, settings_parser
from cli.terminal.style import say


def parser() -> SettingsParser:
    """All settings."""
    return settings_parser("serve")


def run(arguments: list[str]) -> int:
    """Serve until it is stopped."""
    loaded, _ = load(parser(), arguments)
    from engine import OctavoError
    from server.door.listening import StartupError
    from server.run import serve

    try:
        return serve(loaded.engine, loaded.settings, version(), notes=loaded.notes)
    except (OctavoError, StartupError) as problem:
        paragraph = " ".join(line.strip() for line in str(problem).splitlines())  # may have several lines
        say("octavo", f"cannot start: {paragraph}")
        return 1
