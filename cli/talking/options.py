"""Flags of the commands that talk with a model: the choice of the model, and decoding."""

from __future__ import annotations

import argparse
import math
import os
import re
from typing import Any, get_args, get_type_hints

from cli.terminal.parser import OneLineParser
from engine import FILTERS, MAX_STOP_STRINGS, NUMBER_RANGES, EngineConfig, InvalidRequestError, SamplingParams
from server.config.wording import field_docs

SAMPLING = ("max_tokens", *(column.name for column in FILTERS), "seed", "stop", "min_tokens")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
BEAMS = ("num_beams", "length_penalty", "early_stopping")
# Settings of `octavo serve` that are useful for a model that is loaded here; variables set all others.
LOADING = {
    "demo": "the bundled model to load: chat, or seq2seq for translation",
    "device": "cpu, cuda, cuda:N",
    "dtype": "float32, bfloat16, float16",
    "quantization": "int8, int4, int8-fast (CPU only), stored or none",
    "threads": "number of CPU threads",
    "max-model-len": "maximum tokens of prompt and answer together",
    "chat-template": "Jinja file, or a name such as chatml",
    "generation-config": "none: ignore the model's default parameters",
    "revision": "branch, tag or commit on the hub",
}
_HINTS = get_type_hints(EngineConfig)
_CHOICES: dict[str, tuple[str, ...]] = {
    "demo": ("chat", "seq2seq"),
    "dtype": get_args(_HINTS["dtype"]),
    "quantization": get_args(get_args(_HINTS["quantization"])[0]),
    "generation-config": ("auto", "none"),
}
_DOCS = field_docs(SamplingParams) | {
    "max_tokens": "maximum tokens of an answer [chat and run: the rest of the context; complete: up to 128]",
    "temperature": "0 always takes the most probable token, 1 samples from the model's distribution [the model's, "
    "or 1]",
    "presence_penalty": "amount subtracted from the logit of each token that the answer contains, from -2 to 2 [0]",
    "frequency_penalty": "amount subtracted from a token's logit for each occurrence in the answer, from -2 to 2 [0]",
    "seed": "makes the answer reproducible",
    "stop": f"text that ends the answer. Repeat the flag for several texts, at most {MAX_STOP_STRINGS}. Not allowed "
    "with beams",
    "num_beams": "beam search with this many beams: finds a more probable answer, without sampling",
}
_DEFAULT = re.compile(r"(?: \(|; )([\d.]+)\)$")  # of a field, at the end of its help
_EARLY: dict[str, Any] = {"true": True, "false": False, "never": "never"}


def add_place(parser: OneLineParser) -> None:
    """Add flags for the server, or for loading the model."""
    url = (
        f"URL of a server. Without URL and MODEL, the server at {default_url()} is used if there is one; otherwise the "
        "bundled model is loaded."
    )
    add_server(parser, url)
    add_loading(parser)


def add_server(parser: OneLineParser, url: str | None = None) -> None:
    """Add flags for the server and its key. `url`: the help text of --url."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", metavar="URL", help=url or f"URL of the server [{default_url()}]")
    group.add_argument("--api-key", metavar="KEY", help="API key for the server [first key of OCTAVO_API_KEY]")
    group.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="give up after this many seconds of silence [600]",
    )


def add_loading(parser: OneLineParser) -> None:
    """Add flags for a model that this command loads."""
    group = parser.add_argument_group("loading a model (as in octavo serve)")
    for name, about in LOADING.items():
        group.add_argument(f"--{name}", metavar="X", choices=_CHOICES.get(name), help=about)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return seconds


def add_decoding(parser: OneLineParser, *, beams: bool) -> None:
    """Add the flags for decoding, with the help texts of `SamplingParams`."""
    _add(parser, "sampling", SAMPLING)
    _add(parser, "penalties", PENALTIES)
    if beams:
        _add(parser, "beam search", BEAMS)


def _add(parser: OneLineParser, title: str, names: tuple[str, ...]) -> None:
    group = parser.add_argument_group(title)
    for name in names:
        about = _about(name).replace("%", "%%")
        flag = "--" + name.replace("_", "-")
        if name == "stop":
            group.add_argument(flag, action="append", metavar="TEXT", help=about)
        elif name == "early_stopping":
            group.add_argument(flag, choices=tuple(_EARLY), help="when beam search stops [the model's, or false]")
        else:
            kind = int if NUMBER_RANGES[name].integer else float
            group.add_argument(flag, type=kind, metavar="N" if kind is int else "X", help=about)


def _about(name: str) -> str:
    """The help text of a flag, with its default in brackets, as for all flags. A model may have another default."""
    text = _DOCS[name]
    default = _DEFAULT.search(text.removesuffix("."))
    if default is None:
        return text
    closing = ")" if default[0].startswith(";") else ""  # punctuation before the default
    return f"{text[: default.start()]}{closing} [the model's, or {float(default[1]):g}]"


def decoding(given: argparse.Namespace) -> dict[str, Any]:
    """The decoding fields for a request's body. Raises InvalidRequestError if a value is out of range or contradicts
    another; names the flag."""
    names = (*SAMPLING, *PENALTIES, *BEAMS, "n", "ignore_eos")
    values = {name: getattr(given, name, None) for name in names}
    fields = {name: value for name, value in values.items() if value is not None and value is not False}
    if "early_stopping" in fields:
        fields["early_stopping"] = _EARLY[fields["early_stopping"]]
    check(fields)
    return fields


def settings_of(parser: OneLineParser, given: argparse.Namespace) -> dict[str, Any]:
    """The decoding that the flags describe; ends the process with status 2 for invalid flags."""
    try:
        return decoding(given)
    except InvalidRequestError as problem:
        parser.error(str(problem))


def check(fields: dict[str, Any]) -> None:
    """Refuse values that no server accepts. Raises InvalidRequestError: names the flag."""
    try:
        SamplingParams(**fields)
    except InvalidRequestError as problem:
        text = str(problem)
        for name in sorted(fields, key=len, reverse=True):
            text = text.replace(name, "--" + name.replace("_", "-")) if "_" in name else text
        name = text.partition(" ")[0]
        raise InvalidRequestError(f"--{text}" if name in fields else text) from None


def loading(given: argparse.Namespace) -> list[str]:
    """The flags of `octavo serve` in the arguments."""
    arguments = []
    for name in LOADING:
        value = getattr(given, name.replace("-", "_"))
        if value is not None:
            arguments.append(f"--{name}={value}")
    return arguments


def default_url() -> str:
    """The default address of `octavo serve`."""
    return f"http://127.0.0.1:{default_port()}"


def default_port() -> str:
    """The port of `octavo serve`."""
    return os.environ.get("OCTAVO_PORT") or "8000"


def default_key() -> str | None:
    """The first key of `octavo serve`'s settings."""
    return os.environ.get("OCTAVO_API_KEY", "").split(",")[0].strip() or None
