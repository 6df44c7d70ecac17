"""Settings from a command line, with their sources. Precedence: flag, environment variable, config file, default."""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic_settings import CliApp, CliSettingsSource

from cli.commands import COMMANDS
from cli.terminal.paragraphs import filled
from cli.terminal.parser import OneLineParser
from engine import ConfigError, EngineConfig
from server.config.groups import GROUPS, OTHER, group_of
from server.config.named import is_named
from server.config.settings import Settings, SettingsBase, description, flag, variable
from server.config.sources import VariableSource, read_file, unknown_variables
from server.config.wording import is_switch

_FIELDS = Settings.model_fields
_LONG_NAME = rf"(?<![\w/-])({'|'.join(name for name in _FIELDS if '_' in name)})(?![\w/-]|\.\w)"
_EPILOG = (
    "Precedence: flag, environment variable (in parentheses), file of --config, default (in brackets). `octavo config` "
    "shows the value of each setting and its source."
)


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a value. `name`: of the flag or variable, the file's path, or ""."""

    kind: Literal["flag", "variable", "file", "default"]
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedSettings:
    """All settings with their sources."""

    settings: SettingsBase
    engine: EngineConfig
    origins: Mapping[str, Origin]
    notes: tuple[str, ...]  # sentences about variables without effect
    named: tuple[str, ...] = ()  # the arguments NAME=PATH, if several models are given


class SettingsParser(OneLineParser):
    """The parser of a command whose flags are settings. `load` turns the parsed flags into settings. `names`: the
    settings that have flags; all by default. The other settings come only from variables and the file."""

    def __init__(self, prog: str, about: str, names: Collection[str] = _FIELDS):
        super().__init__(prog=prog, usage=f"{prog} [MODEL | NAME=MODEL ...] [flags]", description=about, epilog=_EPILOG)
        groups = {title: self.add_argument_group(title) for title in (*GROUPS, OTHER)}
        elsewhere = argparse.ArgumentParser(add_help=False)

        def add_argument(parser: argparse.ArgumentParser, *flags: str, **options: Any) -> argparse.Action:
            name = options.get("dest", flags[0])
            options["help"] = _help(name).replace("%", "%%")
            if is_switch(_FIELDS[name]):
                options.pop("metavar", None)  # for a setting without a default
                options["action"] = argparse.BooleanOptionalAction
            if "metavar" in options:
                options["metavar"] = _metavar(name)
            if get_origin(_FIELDS[name].annotation) is tuple:
                options["action"] = "append"  # before 2.16, pydantic-settings kept only the last value
            if name == "lora_modules":  # as in vLLM: several values after one flag
                options |= {"action": "extend", "nargs": "+"}
            group = groups[group_of(name)] if name in names else elsewhere
            return (parser if name == "model" else group).add_argument(*flags, **options)

        self._source = CliSettingsSource[argparse.ArgumentParser](
            Settings, root_parser=self, add_argument_method=add_argument
        )
        for title, names_of_group in GROUPS.items():  # the order of the help
            places = dict(zip(names_of_group, range(len(names_of_group)), strict=True))
            groups[title]._group_actions.sort(key=functools.partial(_place, places))
        # Unlike a variable, a flag counts even if it is empty: an empty key must not mean "no key".
        self._source.env_ignore_empty = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; arguments NAME=MODEL become `named`."""
        given, rest = super().parse_known_args(args, namespace)
        words = [given.model] if isinstance(getattr(given, "model", None), str) else []
        words += [word for word in rest if not word.startswith("-")]
        given.named = ()
        if words and all(map(is_named, words)):
            given.model, given.named = None, tuple(words)
            rest = [word for word in rest if word.startswith("-")]
        return given, rest

    def load(self, given: argparse.Namespace) -> LoadedSettings:
        """The settings from these flags, the environment and the file. Raises ConfigError, with one sentence that
        names the wrong flag, variable or key of the file."""
        named = {name: value for name, value in vars(given).items() if name in _FIELDS}
        # Joins repeated flags into one text, which every version of pydantic-settings understands.
        named = {name: ",".join(value) if isinstance(value, list) else value for name, value in named.items()}
        flags, variables = self._source(parsed_args=named)(), VariableSource(Settings)()
        origins = {name: Origin("variable", variable(name)) for name in variables}
        origins |= {name: Origin("flag", _as_given(name, value)) for name, value in flags.items()}
        try:
            path = str(flags.get("config", variables.get("config")) or "")
            content = read_file(path, _FIELDS) if path else {}
            origins = {name: Origin("file", path) for name in content} | origins
            settings = CliApp.run(Settings, named, self._source, **content)
            engine = settings.engine
        except ConfigError as problem:
            raise ConfigError(_with_origins(str(problem), origins)) from None
        if "demo" in origins and settings.demo:
            origins["model"] = origins["demo"]
        known = {variable(name) for name in _FIELDS}
        return LoadedSettings(
            settings=settings,
            engine=engine,
            origins={name: origins.get(name, Origin("default")) for name in _FIELDS},
            notes=tuple(unknown_variables(os.environ, known)),
            named=getattr(given, "named", ()),
        )


def _place(places: Mapping[str, int], action: argparse.Action) -> int:
    return places[action.dest]


def _as_given(name: str, value: Any) -> str:
    switched_off = is_switch(_FIELDS[name]) and str(value) == "False"
    return flag(f"no_{name}" if switched_off else name)


def _with_origins(message: str, origins: Mapping[str, Origin]) -> str:
    """A message about settings that uses the names that the user used."""

    def named(match: re.Match[str]) -> str:
        origin = origins.get(match[0])
        if origin is None:
            return match[0]
        return f"{match[0]} in {origin.name}" if origin.kind == "file" else origin.name

    # A short name may also be an ordinary word, so it counts only at the beginning of the message.
    return re.sub(rf"^({'|'.join(_FIELDS)})(?= )|{_LONG_NAME}", named, message)


def _help(name: str) -> str:
    default = _FIELDS[name].default
    if name == "model":
        text = " [the bundled model]"
    elif default in (None, (), ""):
        text = ""
    else:
        text = f" [{_shown(default)}]"
    about = re.sub(_LONG_NAME, lambda match: flag(match[0]), description(name).removesuffix("."))
    return f"{about}{text} ({variable(name)})"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return str(int(default)) if isinstance(default, float) and default.is_integer() else str(default)


def _metavar(name: str) -> str:
    kind = _FIELDS[name].annotation
    if name == "model":
        return "MODEL"
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    kinds = get_args(kind) or (kind,)
    if get_origin(kinds[0]) is Literal:  # or None
        return "|".join(get_args(kinds[0]))
    if int in kinds:
        return "SIZE" if str in kinds else "N"
    return "X" if float in kinds else "TEXT"


def settings_parser(command: str, *, json: bool = False) -> SettingsParser:
    """The parser of a command whose flags are the settings, with --json if the command prints something."""
    about = COMMANDS[command].about
    parser = SettingsParser(f"octavo {command}", f"{about[0].upper()}{about[1:]}.")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def load(parser: SettingsParser, arguments: list[str]) -> tuple[LoadedSettings, Any]:
    """The settings and the other arguments. Wrong values end the process with status 2 and one line."""
    given = parser.parse_args(arguments)
    try:
        return parser.load(given), given
    except ConfigError as problem:
        parser.error(str(problem))


def print_notes(loaded: LoadedSettings) -> None:
    """Print the notes on variables without effect to stderr."""
    for note in loaded.notes:
        print(filled(f"octavo: {note}", sys.stderr), file=sys.stderr)
