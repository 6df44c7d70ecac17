"""Parsers that report errors in one line with a suggestion, and colour their help in a terminal."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from cli.terminal.paragraphs import fill
from cli.terminal.style import PLAIN_FLAG, console, is_rich, problem_text
from server.config.wording import did_you_mean

_KINDS = {"int": "an integer", "float": "a number", "Path": "a path"}
# argparse's words for a value, and their replacements.
_WRONG_KIND = re.compile(r"argument (?P<name>[^:]+): invalid (?P<kind>\w+) value: (?P<value>.+)")
_WRONG_CHOICE = re.compile(r"argument (?P<name>[^:]+): invalid choice: (?P<value>.+?) \(choose from (?P<known>.+)\)")
_NO_VALUE = re.compile(r"argument (--[\w-]+)/(--no-[\w-]+): ignored explicit argument")
_RULE = re.compile(r"^argument (--[\w-]+): must\b")
_DEFAULT = re.compile(r" \(default:? ((?:[^()]|\([^()]*\))*)\)\.?(?= \(OCTAVO_|$)")
_FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line instead of the whole usage, exits with status 2, and suggests the nearest name."""

    def __init__(self, *args: Any, **options: Any):
        options.setdefault("formatter_class", WholeFlags)
        options["allow_abbrev"] = False
        super().__init__(*args, **options)
        self.color = False  # newer versions of argparse would colour the text a second time
        self._positionals.title = "arguments"
        self.add_argument(PLAIN_FLAG, action="store_true", help="print plain text, as with NO_COLOR")

    def error(self, message: str) -> NoReturn:
        """Print the error and end the process."""
        text = " ".join(_better(message).split()).rstrip(".")
        self.exit(2, problem_text(self.prog, f"{text} (see {self.prog} --help)") + "\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; an unknown flag or a superfluous argument ends the process."""
        given, rest = self.parse_known_args(args, namespace)
        for argument in rest:
            if argument.startswith("-") and argument != "-":
                self.error(self._unknown(argument.partition("=")[0]))
        if rest:
            words = "; put a text of several words in quotation marks" if "PROMPT" in self.format_usage() else ""
            self.error(f"unexpected argument {rest[0]!r}{words}")
        return given

    def print_help(self, file: Any = None) -> None:
        """Print the help; in a terminal with coloured headings and flags."""
        stream = sys.stdout if file is None else file
        text = self.format_help()
        if not is_rich(stream):
            stream.write(text)
            return
        print_coloured(text, stream)

    def _unknown(self, name: str) -> str:
        if name in ("--port", "--host", "-p") and "--url" in self._option_string_actions:
            return f"unknown flag {name}: use --url http://HOST:PORT for a server"
        arguments = {f"--{action.dest}" for action in self._get_positional_actions()}
        near = did_you_mean("--" + name.lstrip("-"), {**self._option_string_actions, **dict.fromkeys(arguments)})
        for named in arguments - set(self._option_string_actions):
            if near.endswith(f" {named}?"):
                return f"unknown flag {name}: give the {named[2:]} without a flag, after the command"
        return f"unknown flag {name}{near}"


class WholeFlags(argparse.HelpFormatter):
    """Does not break lines within a flag's name. Paragraphs of a description are wrapped; indented lines keep their
    columns.

    For every flag: its help ends without a full stop, before its default in brackets.
    """

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, max_help_position=26, **options)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if action.metavar is None and action.choices is not None:
            default_metavar, action = "|".join(map(str, action.choices)), argparse.Action([], action.dest)
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        return _DEFAULT.sub(r" [\1]", super()._expand_help(action)).removesuffix(".")

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(
            fill(part, width) if "\n  " in f"\n{part}" else fill(" ".join(part.split()), width) for part in paragraphs
        )


def print_coloured(text: str, stream: Any) -> None:
    """Print help text in colours. A line without indentation that ends with a colon is a heading."""
    from rich.text import Text

    shown = Text(text.rstrip("\n"))
    shown.highlight_regex(r"(?m)^(usage:|\S.*:$)", "bold yellow")
    shown.highlight_regex(_FLAG, "cyan")
    shown.highlight_regex(r"(?m)^  [a-z][a-z ]*?(?=  )", "bold cyan")
    shown.highlight_regex(r"\(OCTAVO_\w+\)|\[[^\]\[]*\]$", "dim")
    console(stream).print(shown)


def _better(message: str) -> str:
    if switch := _NO_VALUE.match(message):
        return f"{switch[1]} takes no value; use {switch[2]} to switch it off"
    if wrong := _WRONG_KIND.fullmatch(message):
        return f"{wrong['name']} must be {_KINDS.get(wrong['kind'], wrong['kind'])}, got {wrong['value']}"
    if wrong := _WRONG_CHOICE.fullmatch(message):
        known = [item.strip().strip("'") for item in wrong["known"].split(",")]
        near = did_you_mean(wrong["value"].strip("'"), known)
        return f"{wrong['name']} must be one of {', '.join(known)}, got {wrong['value']}{near}"
    return _RULE.sub(r"\1 must", message)
