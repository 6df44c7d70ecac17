"""The commands: one file each, with `parser()` and `run(arguments)`, which returns the exit status."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.terminal.parser import OneLineParser


@dataclass(frozen=True, slots=True)
class Command:
    """A command, none of whose modules is imported before it is needed.

    Attributes:
        group: under which the overview shows it.
        about: what it does, without a full stop.
        module: that has `parser` and `run`.
        kinds: names of its own commands, and what they do; `parser` takes one as its argument.
    """

    group: str
    about: str
    module: str
    kinds: tuple[tuple[str, str], ...] = ()

    def parser(self, kind: str = "") -> OneLineParser:
        """Its parser, or that of one of its kinds."""
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
        "serving", "serve a model over the OpenAI API; without MODEL a bundled one", "cli.commands.serve"
    ),
    "chat": Command("talking", "talk with a model in the terminal", "cli.commands.chat"),
    "complete": Command(
        "talking", "complete a prompt, from an argument or a pipe; sampling and beams", "cli.commands.complete"
    ),
    "bench": Command(
        "measuring",
        "measure latencies and throughput, with plots",
        "cli.commands.bench",
        kinds=(
            ("serve", "load any OpenAI-compatible server and measure its answers"),
            ("offline", "measure the engine alone, in this process, without a server"),
        ),
    ),
    "models": Command(
        "looking", "list the supported families, or say whether a checkpoint is supported", "cli.commands.models"
    ),
    "doctor": Command(
        "looking", "check this machine, the settings and the model, and say what to fix", "cli.commands.doctor"
    ),
    "config": Command(
        "looking", "show every setting, its value and where it came from", "cli.commands.config"
    ),
    "completion": Command(
        "the shell", "print what makes bash, zsh or fish complete commands and flags", "cli.commands.completion"
    ),
}  # fmt: skip

# What people call commands elsewhere.
SYNONYMS: dict[str, str] = {
    "ask": "complete", "api": "serve", "bash": "completion", "benchmark": "bench", "check": "doctor",
    "completions": "complete", "diagnose": "doctor", "env": "config", "families": "models", "generate": "complete",
    "infer": "complete", "launch": "serve", "list": "models", "ls": "models", "measure": "bench", "predict": "complete",
    "repl": "chat", "run": "chat", "server": "serve", "settings": "config", "start": "serve", "status": "doctor",
    "talk": "chat", "translate": "complete", "up": "serve",
}  # fmt: skip
