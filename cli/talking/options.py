"""Flags of the commands that talk with a model: which one, and how it decodes."""

from __future__ import annotations

import argparse
import math
import os
from typing import Any, get_args, get_type_hints

from cli.terminal.parser import OneLineParser
from engine import FILTERS, NUMBER_RANGES, EngineConfig, InvalidRequestError, SamplingParams
from server.config.wording import field_docs

SAMPLING = ("max_tokens", *(column.name for column in FILTERS), "seed", "stop", "min_tokens")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
BEAMS = ("num_beams", "length_penalty", "early_stopping")
# Settings of `octavo serve` that a model which is loaded here may need on the spot; variables set the others.
LOADING = {
    "demo": "which of the bundled models: chat, or seq2seq, which translates",
    "device": "cpu, cuda, cuda:N",
    "dtype": "float32, bfloat16, float16",
    "quantization": "int8, int4, int8-fast (on a CPU), or stored: as small as the checkpoint has them",
    "threads": "that compute on a CPU",
    "max-model-len": "longest prompt plus answer, in tokens",
    "chat-template": "for a model without one: a Jinja file, or a name such as chatml",
    "revision": "branch, tag or commit on the hub",
}
_HINTS = get_type_hints(EngineConfig)
_CHOICES: dict[str, tuple[str, ...]] = {
    "demo": ("chat", "seq2seq"),
    "dtype": get_args(_HINTS["dtype"]),
    "quantization": get_args(get_args(_HINTS["quantization"])[0]),
}
_DOCS = field_docs(SamplingParams) | {
    "max_tokens": "most tokens of an answer [chat: what is left of the context; complete: 128, or that]",
    "temperature": "0 takes the most probable token each time, 1 draws as the model says [the model's own default]",
    "seed": "the same seed gives the same answer",
    "num_beams": "beam search with that many beams: the most probable answer as a whole; it does not sample",
}
_EARLY: dict[str, Any] = {"true": True, "false": False, "never": "never"}


def add_place(parser: OneLineParser) -> None:
    """Where the model is: a server's, or loaded here."""
    group = parser.add_argument_group("which model")
    group.add_argument("--url", metavar="URL", help="of a server; without it and without a model's name: what serves "
                       f"at {default_url()}, else the bundled model, which is loaded here")  # fmt: skip
    group.add_argument("--api-key", metavar="KEY", help="that the server wants [the first of OCTAVO_API_KEY]")
    group.add_argument(
        "--timeout", type=_seconds, default=600.0, metavar="SECONDS", help="of silence that end an answer [600]"
    )
    add_loading(parser)


def add_loading(parser: OneLineParser) -> None:
    """How a model is loaded here."""
    group = parser.add_argument_group("a model that is loaded here")
    for name, about in LOADING.items():
        group.add_argument(f"--{name}", metavar="X", choices=_CHOICES.get(name), help=f"{about} (as in octavo serve)")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return seconds


def add_decoding(parser: OneLineParser, *, beams: bool) -> None:
    """How answers are decoded; the help is `SamplingParams`'."""
    _add(parser, "sampling", SAMPLING)
    _add(parser, "penalties", PENALTIES)
    if beams:
        _add(parser, "beam search", BEAMS)


def _add(parser: OneLineParser, title: str, names: tuple[str, ...]) -> None:
    group = parser.add_argument_group(title)
    for name in names:
        about = _DOCS[name].replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if name == "stop":
            group.add_argument(flag, action="append", metavar="TEXT", help=f"{about} Repeat the flag for several.")
        elif name == "early_stopping":
            group.add_argument(flag, choices=tuple(_EARLY), help="when the beams stop: true, false or never [false]")
        else:
            kind = int if NUMBER_RANGES[name].integer else float
            group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=about)


def decoding(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request's body that were given.

    Raises:
        InvalidRequestError: a value is out of range or contradicts another; names the flag.
    """
    names = (*SAMPLING, *PENALTIES, *BEAMS, "n", "ignore_eos")
    values = {name: getattr(given, name, None) for name in names}
    fields = {name: value for name, value in values.items() if value is not None and value is not False}
    if "early_stopping" in fields:
        fields["early_stopping"] = _EARLY[fields["early_stopping"]]
    check(fields)
    return fields


def settings_of(parser: OneLineParser, given: argparse.Namespace) -> dict[str, Any]:
    """The decoding that the flags ask for; ends the process with status 2 where they cannot be."""
    try:
        return decoding(given)
    except InvalidRequestError as problem:
        parser.error(str(problem))


def check(fields: dict[str, Any]) -> None:
    """Refuse what no server would take.

    Raises:
        InvalidRequestError: names the flag.
    """
    try:
        SamplingParams(**fields)
    except InvalidRequestError as problem:
        text = str(problem)
        for name in sorted(fields, key=len, reverse=True):
            text = text.replace(name, "--" + name.replace("_", "-")) if "_" in name else text
        name = text.partition(" ")[0]
        raise InvalidRequestError(f"--{text}" if name in fields else text) from None


def loading(given: argparse.Namespace) -> list[str]:
    """The flags of `octavo serve` among what was given."""
    arguments = []
    for name in LOADING:
        value = getattr(given, name.replace("-", "_"))
        if value is not None:
            arguments.append(f"--{name}={value}")
    return arguments


def default_url() -> str:
    """Where `octavo serve` serves by default."""
    return f"http://127.0.0.1:{default_port()}"


def default_port() -> str:
    """The port of `octavo serve`."""
    return os.environ.get("OCTAVO_PORT") or "8000"


def default_key() -> str | None:
    """The first key that `octavo serve` would take."""
    return os.environ.get("OCTAVO_API_KEY", "").split(",")[0].strip() or None
