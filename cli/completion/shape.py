"""The words that can stand on a command line, taken from the parsers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cli.commands import COMMANDS

Files = Literal["", "file", "folder"]
# Settings that are paths; their flags take text.
_PATHS: dict[str, Files] = {
    "config": "file", "ssl_certfile": "file", "ssl_keyfile": "file", "api_key_file": "file", "uds": "file",
    "mmproj": "file", "tokenizer": "folder", "quantization_cache": "folder", "kv_disk": "folder", "model": "folder",
    "folder": "folder",
}  # fmt: skip
_LENGTH = 70  # maximum characters of a description


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument, either the value of a flag or positional. `files`: the kind of path that it names."""

    name: str
    values: tuple[str, ...] = ()
    files: Files = ""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag with all its names; `takes` is None for a flag without a value."""

    names: tuple[str, ...]
    about: str
    takes: Argument | None
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class CommandShape:
    """A command: its words ("bench serve"), the possible next words, and its flags."""

    words: str
    about: str
    next: tuple[tuple[str, str], ...] = ()
    arguments: tuple[Argument, ...] = ()
    flags: tuple[Flag, ...] = ()


def shapes() -> Iterator[CommandShape]:
    """Every command; the first one, without words, is `octavo` itself."""
    switches = (Flag(("--help", "-h"), "show the commands", None), Flag(("--version",), "show the version", None))
    plain = Flag(("--no-color",), "plain text in a terminal, too", None)
    commands = tuple((name, command.about) for name, command in COMMANDS.items())
    yield CommandShape("", "", commands, (), (*switches, plain))
    for name, command in COMMANDS.items():
        yield _shape(name, command.about, command.parser(), command.kinds)
        for kind, about in command.kinds:
            yield _shape(f"{name} {kind}", about, command.parser(kind), ())


def _shape(words: str, about: str, parser: argparse.ArgumentParser, next: tuple[tuple[str, str], ...]) -> CommandShape:
    arguments, flags = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        takes = None if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction) else _argument(action)
        if action.option_strings:
            repeats = isinstance(action, argparse._AppendAction)
            flags.append(Flag(tuple(action.option_strings), _brief(action.help), takes, repeats))
        elif takes is not None:
            arguments.append(takes)
    return CommandShape(words, about, next, tuple(arguments), tuple(flags))


def _argument(action: argparse.Action) -> Argument:
    metavar: Any = action.metavar or action.dest.upper()
    if action.choices is not None:
        return Argument(action.dest, tuple(map(str, action.choices)))
    if "|" in metavar and metavar == metavar.lower():  # auto|float32|bfloat16
        return Argument(action.dest, tuple(metavar.split("|")))
    files: Files = "file" if action.type is Path else _PATHS.get(action.dest, "")
    if metavar == "FOLDER":
        files = "folder"
    return Argument(metavar, (), files)


def _brief(text: str | None) -> str:
    """The beginning of a help text, without characters that are special in shells."""
    text = re.sub(r"\s+", " ", (text or "").replace("%%", "%"))
    text = re.split(r"[.;:(\[]", text, maxsplit=1)[0].strip()
    return text if len(text) <= _LENGTH else text[:_LENGTH].rpartition(" ")[0] + " ..."
