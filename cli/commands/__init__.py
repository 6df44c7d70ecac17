"""The commands: one file each, with `parser()` and `run(arguments)`, which returns the exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from cli.terminal.paragraphs import filled
from cli.terminal.style import is_rich

if TYPE_CHECKING:
    from cli.terminal.parser import OneLineParser


@dataclass(frozen=True, slots=True)
class Command:
    """A command whose modules are imported only when they are needed."""

    group: str
    about: str  # a short description, without a full stop
    module: str  # the module with `parser` and `run`
    # names and descriptions of its subcommands; `parser` takes one as its argument
    kinds: tuple[tuple[str, str], ...] = ()

    def parser(self, kind: str = "") -> OneLineParser:
        module = import_module(self.module)
        made: OneLineParser = module.parser(kind) if self.kinds else module.parser()
        return made

    @property
    def run(self) -> Callable[[list[str]], int]:
        """Takes the arguments after the name."""
        run: Callable[[list[str]], int] = import_module(self.module).run
        return run


COMMANDS: dict[str, Command] = {
    "serve": Command(
        "serving", "serve models over HTTP; without MODEL, the bundled one", f"{__name__}.serve"
    ),
    "run": Command(
        "serving", "serve a model and chat with it in the same terminal", f"{__name__}.run"
    ),
    "chat": Command("talking", "chat with a model in the terminal", f"{__name__}.chat"),
    "complete": Command(
        "talking", "complete a prompt from an argument or stdin", f"{__name__}.complete"
    ),
    "batch": Command(
        "talking", "answer the requests of a JSON Lines file", f"{__name__}.batch"
    ),
    "ps": Command(
        "serving", "list the models of a running service and their states", f"{__name__}.ps"
    ),
    "load": Command(
        "serving", "load a model of a running service with several", f"{__name__}.load"
    ),
    "unload": Command(
        "serving", "unload a model of a running service with several", f"{__name__}.unload"
    ),
    "bench": Command(
        "measuring",
        "measure latency and throughput of the engine",
        f"{__name__}.bench",
        kinds=(("offline", "measure the engine in this process, without a server"),),
    ),
    "quantize": Command(
        "converting",
        "write a quantized copy of a checkpoint",
        f"{__name__}.quantize",
    ),
    "models": Command(
        "inspecting", "list the supported model families, or check a checkpoint", f"{__name__}.models"
    ),
    "doctor": Command(
        "inspecting", "check the machine, the settings and the model", f"{__name__}.doctor"
    ),
    "config": Command(
        "inspecting", "show every setting, its value and its source", f"{__name__}.config"
    ),
    "completion": Command(
        "shell", "print the completion script for bash, zsh or fish", f"{__name__}.completion"
    ),
}  # fmt: skip

# Names of the same commands in other tools.
SYNONYMS: dict[str, str] = {
    "api": "serve", "ask": "complete", "bash": "completion", "benchmark": "bench", "check": "doctor",
    "completions": "complete", "compress": "quantize", "convert": "quantize", "diagnose": "doctor", "env": "config",
    "families": "models", "generate": "complete", "infer": "complete", "launch": "serve", "list": "models",
    "ls": "models", "measure": "bench", "predict": "complete", "quantise": "quantize", "repl": "chat",
    "server": "serve", "settings": "config", "start": "serve", "status": "doctor", "talk": "chat",
    "translate": "complete", "up": "serve",
}  # fmt: skip

_HEAD = """\
usage: octavo COMMAND [flags]

Serve transformer models over HTTP, or use them in the terminal.
"""
_FOOT = """\
flags:
  -h, --help     show this help; octavo COMMAND --help lists its flags
  --version      show the version
  --no-color     print plain text, as with NO_COLOR

first steps:
  octavo chat                          chat with the bundled model
  octavo serve                         serve it on http://127.0.0.1:8000
  octavo complete "Once upon a time"   use that server, or load the model here
"""


def overview() -> str:
    width = max(len(name) for name in COMMANDS) + 4
    groups: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        groups.setdefault(command.group, []).append(f"  {name:<{width}} {command.about}")
    parts = ["\n".join([f"{group}:", *lines]) + "\n" for group, lines in groups.items()]
    return "\n".join([_HEAD, *parts, _FOOT])


def print_overview() -> None:
    """Print the overview, in colours if the terminal takes them."""
    text = filled(overview(), sys.stdout)
    if not is_rich():
        print(text, end="")
        return
    from cli.terminal.parser import print_coloured

    print_coloured(text, sys.stdout)
