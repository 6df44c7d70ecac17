"""What the commands that talk with a model have in common: flags become settings, a model is found, things go wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from cli.talking.errors import TalkError
from cli.talking.model import Model, open_model
from cli.talking.options import decoding, default_key, default_url, loading
from cli.terminal.parser import OneLineParser
from cli.terminal.style import note, say
from engine import InvalidRequestError


def settings_of(parser: OneLineParser, given: argparse.Namespace) -> dict[str, Any]:
    """The decoding that the flags ask for; ends the process with status 2 where they cannot be."""
    try:
        return decoding(given)
    except InvalidRequestError as problem:
        parser.error(str(problem))


def talk(prog: str, given: argparse.Namespace, with_model: Callable[[Model], int]) -> int:
    """Open the model that the flags name and talk with it; the command's status: 1 it could not, 130 stopped by Ctrl-C,
    else what `with_model` returns."""
    try:
        with open_model(
            given.model, given.url, api_key=given.api_key or default_key(), default_url=default_url(),
            timeout=given.timeout, loading=loading(given),
        ) as model:  # fmt: skip
            return with_model(model)
    except TalkError as problem:
        say(prog, str(problem))
        return 1
    except KeyboardInterrupt:
        note("stopped")
        return 130
