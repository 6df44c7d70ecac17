"""Settings as flags and environment variables, made from the dataclasses that hold them.

A field `max_model_len` is the flag --max-model-len and the variable OCTAVO_MAX_MODEL_LEN; the flag is
the stronger. Type, choices, default and help text all come from the class.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from engine import ConfigError
from server.schemas import field_docs

T = TypeVar("T")
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the service around the engine.

    Attributes:
        host: address to listen on; 0.0.0.0 or :: for all.
        port: port to listen on; 0 for any free one.
        served_model_name: the model's id to clients (default: the folder's last name, or the hub id).
        log_level: debug, info, warning or error.
        shutdown_timeout: seconds that running requests get to finish after SIGTERM or Ctrl-C.
        max_engine_failures: so many deaths of the engine in a row, none after a minute of service, end the
            service; before that it is started again.
        liveness_timeout: seconds without a step after which /health/live calls a working engine stuck.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    shutdown_timeout: int = 30
    max_engine_failures: int = 3
    liveness_timeout: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}.")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout must be at least 0 seconds, got {self.shutdown_timeout}.")
        if self.max_engine_failures < 1:
            raise ConfigError(f"max_engine_failures must be at least 1, got {self.max_engine_failures}.")
        if not self.liveness_timeout > 0:
            raise ConfigError(f"liveness_timeout must be above 0 seconds, got {self.liveness_timeout}.")
        if self.served_model_name == "":
            raise ConfigError("served_model_name must not be empty.")


class OneLineParser(argparse.ArgumentParser):
    """Reports a wrong value in one line instead of the whole usage; exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _converter(hint: Any) -> Callable[[str], Any]:
    """Text to the hinted type; raises ValueError with a phrase that says what is expected."""
    if get_origin(hint) in (Union, types.UnionType):
        # "int | str" takes any text; else the one type besides None.
        kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
        return _converter(str if str in kinds else kinds[0])
    if get_origin(hint) is Literal:
        return _one_of(get_args(hint))
    known: dict[Any, Callable[[str], Any]] = {bool: _boolean, int: _integer, float: _number, str: str}
    return known[hint]


def _one_of(choices: tuple[Any, ...]) -> Callable[[str], Any]:
    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return convert


def _boolean(text: str) -> bool:
    if text.lower() not in _WORDS:
        raise ValueError("must be true or false")
    return _WORDS[text.lower()]


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def flag(name: str) -> str:
    """max_model_len -> --max-model-len."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """max_model_len -> OCTAVO_MAX_MODEL_LEN."""
    return "OCTAVO_" + name.upper()


def add_flags(parser: argparse.ArgumentParser, cls: type, title: str, *, positional: str | None = None) -> None:
    """A flag for every field of a dataclass, in a group of that title; the field `positional` becomes a
    positional argument."""
    docs, hints = field_docs(cls), get_type_hints(cls)
    group = parser.add_argument_group(title)
    for field in dataclasses.fields(cls):
        text = docs[field.name].replace("%", "%%")
        default = "" if field.default in (None, dataclasses.MISSING) else f" [{field.default}]"
        text = f"{text}{default} ({variable(field.name)})"
        if field.name == positional:
            parser.add_argument(field.name, nargs="?", metavar=field.name.upper(), help=text, default=argparse.SUPPRESS)
        elif hints[field.name] is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag(field.name), action=action, help=text, default=argparse.SUPPRESS)
        else:
            metavar = "|".join(get_args(hints[field.name])) if get_origin(hints[field.name]) is Literal else "X"
            group.add_argument(flag(field.name), metavar=metavar, help=text, default=argparse.SUPPRESS)


def build(cls: type[T], given: argparse.Namespace, environ: Mapping[str, str], **fallbacks: Any) -> T:
    """The dataclass filled from flags, then variables, then `fallbacks`, then its own defaults.

    An empty variable counts as not set.

    Raises:
        ConfigError: a value of the wrong type or out of range; names the flag or the variable.
    """
    hints, values = get_type_hints(cls), dict(fallbacks)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if hasattr(given, field.name):
            source, text = flag(field.name), getattr(given, field.name)
        elif environ.get(variable(field.name)):
            source, text = variable(field.name), environ[variable(field.name)]
        else:
            continue
        try:
            values[field.name] = text if isinstance(text, bool) else _converter(hints[field.name])(text)
        except ValueError as problem:
            raise ConfigError(f"{source} {problem}, got {text!r}") from None
    return cls(**values)
