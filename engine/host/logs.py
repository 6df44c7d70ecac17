"""The format of log lines: the same for the service's process and the engine's, as text or as JSON.

A line may contain a client's text. So only a traceback can begin a new line in it, a traceback's lines are indented,
and terminal control characters are escaped.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["console", "json"]

# Fields of every line, in this order; other fields follow, and the traceback comes last.
TIMESTAMP, LEVEL, LOGGER, EVENT, EXCEPTION = "timestamp", "level", "logger", "event", "exception"
_INDENT = "    "


def json_line(fields: Mapping[str, Any]) -> str:
    """A line of JSON in ASCII; values that JSON cannot express are shown as in Python."""
    return json.dumps(_ordered(fields), default=repr)


def console_line(fields: Mapping[str, Any]) -> str:
    """`timestamp LEVEL logger: event key=value ...`, and below it the traceback, indented."""
    rest = _ordered(fields)
    timestamp, level, logger, event = (rest.pop(key, "") for key in (TIMESTAMP, LEVEL, LOGGER, EVENT))
    exception = rest.pop(EXCEPTION, None)
    words = [str(timestamp), str(level).upper(), f"{logger}:", printable(str(event))]
    words += [f"{printable(key)}={_quoted(value)}" for key, value in rest.items()]
    lines = [" ".join(words)]
    if exception:
        lines += [_INDENT + printable(line) for line in str(exception).rstrip().split("\n")]
    return "\n".join(lines)


def printable(text: str) -> str:
    """The text with all unprintable characters (control characters, line breaks, direction marks, lone surrogates) as
    Python's escapes."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _quoted(value: Any) -> str:
    # A value must not look like several fields: neither a quote nor a backslash before one may end it. (`repr` has
    # doubled the backslashes.)
    text = printable(value.replace("\\", r"\\") if isinstance(value, str) else repr(value))
    if text and not any(char in text for char in ' ="'):
        return text
    return '"' + text.replace('"', '\\"') + '"'


def _ordered(fields: Mapping[str, Any]) -> dict[str, Any]:
    first = {key: fields[key] for key in (TIMESTAMP, LEVEL, LOGGER, EVENT) if key in fields}
    last = {EXCEPTION: fields[EXCEPTION]} if EXCEPTION in fields else {}
    return first | {key: value for key, value in fields.items() if key != EXCEPTION} | last


class LineFormatter(logging.Formatter):
    """Formats records of the standard library's logging as such lines."""

    def __init__(self, log_format: LogFormat):
        super().__init__()
        self.log_format = log_format
        self._render = json_line if log_format == "json" else console_line

    def format(self, record: logging.LogRecord) -> str:
        """The whole line, with the traceback of an exception, if any."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        fields = {
            TIMESTAMP: moment.replace("+00:00", "Z"),
            LEVEL: record.levelname.lower(),
            LOGGER: record.name,
            EVENT: record.getMessage(),
        }
        if record.exc_info and record.exc_info[1] is not None:
            fields[EXCEPTION] = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        return self._render(fields)


def configure(level: int, log_format: LogFormat) -> None:
    """Log everything of this process to stderr in that format, including Python's warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(log_format))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)


def configured() -> LogFormat | None:
    """The format that `configure` has set for this process; None if it has not been called."""
    formatters = [handler.formatter for handler in logging.getLogger().handlers]
    return next((one.log_format for one in formatters if isinstance(one, LineFormatter)), None)


def adopt_libraries() -> None:
    """Make loggers with their own handler, which are made when `transformers` is imported, behave like all others."""
    for name in ("transformers", "huggingface_hub"):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
