"""Errors that end a command, each shown as one sentence, and errors of servers."""

from __future__ import annotations

import json
from typing import Any


class BenchError(Exception):
    """The benchmark cannot run; the message explains why in one paragraph."""


class OptionError(BenchError):
    """Malformed or contradictory options; the message names the option and the value."""


class TalkError(Exception):
    """An error with its cause and its fix. `code`: the server's error code, or ""."""

    def __init__(self, message: str, code: str = ""):
        super().__init__(message)
        self.code = code


class NoServerError(TalkError):
    """No server answers at the address."""


class DroppedError(TalkError):
    """The connection closed before the answer was complete."""


class LoadingError(TalkError):
    """The server is still loading its model. `percent`: percentage of the weights that are loaded; None if the server
    does not report it."""

    def __init__(self, message: str, percent: int | None):
        super().__init__(message, "loading")
        self.percent = percent


def error_of(value: Any) -> tuple[str, str]:
    """The message and the code of an error's body, in OpenAI's shape, FastAPI's shape or plain text; "" for a missing
    part."""
    code = ""
    if isinstance(value, dict):
        value = value.get("error", value.get("detail", value.get("message", "")))
    if isinstance(value, dict):
        value, code = value.get("message") or json.dumps(value), str(value.get("code") or "")
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text[:600], code
