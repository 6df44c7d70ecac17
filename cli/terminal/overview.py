"""What `octavo --help` prints: the commands in their groups."""

from __future__ import annotations

import sys

from cli.commands import COMMANDS
from cli.terminal.style import is_rich

_HEAD = """\
usage: octavo COMMAND [flags]

Serves transformer models over HTTP, and talks with them here.
"""
_FOOT = """\
flags:
  -h, --help     show this help; octavo COMMAND --help shows a command's
  --version      show the version
  --no-color     plain text in a terminal, too, as with NO_COLOR

first steps:
  octavo chat                            talk with the bundled model
  octavo serve                           serve it on http://127.0.0.1:8000
  octavo complete "Once upon a time"     ask what serves there, or a model that is loaded here
"""


def overview() -> str:
    """The text."""
    width = max(len(name) for name in COMMANDS) + 4
    groups: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        groups.setdefault(command.group, []).append(f"  {name:<{width}} {command.about}")
    parts = ["\n".join([f"{group}:", *lines]) + "\n" for group, lines in groups.items()]
    return "\n".join([_HEAD, *parts, _FOOT])


def print_overview() -> None:
    """Print it, in colours where they are wanted."""
    if not is_rich():
        print(overview(), end="")
        return
    from cli.terminal.parser import print_coloured

    print_coloured(overview(), sys.stdout)
