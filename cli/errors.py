"""Errors that end a command that measures or talks with a model, each shown as one sentence; errors of servers."""

from __future__ import annotations

import json
from typing import Any


class BenchError(Exception):
    """The benchmark cannot run, for a reason that one paragraph explains."""


class OptionError(BenchError):
    """Options that are malformed or contradict each other; names the option and the value."""


class TalkError(Exception):
    """An error with its cause and its remedy.

    Attributes:
        code: the server's code for it, "" if there is none.
    """

    def __init__(self, message: str, code: str = ""):
        super().__init__(message)
        self.code = code


class NoServerError(TalkError):
    """Nothing answers there."""


class DroppedError(TalkError):
    """The connection closed before the answer was complete."""


class LoadingError(TalkError):
    """The server is still loading its model.

    Attributes:
        percent: of the weights that are loaded; None if the server does not say.
    """

    def __init__(self, message: str, percent: int | None):
        super().__init__(message, "loading")
        self.percent = percent


def error_of(value: Any) -> tuple[str, str]:
    """Message and code of an error's body: OpenAI's shape, FastAPI's, or a text; "" for what it does not hold."""
    code = ""
    if isinstance(value, dict):
        value = value.get("error", value.get("detail", value.get("message", "")))
    if isinstance(value, dict):
        value, code = value.get("message") or json.dumps(value), str(value.get("code") or "")
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text[:600], code
