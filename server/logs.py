"""Structured logs: every record of structlog or the standard library becomes one line in one format.

Modules log with either (`logging.getLogger`, with `extra=` for fields, or `structlog.get_logger`). A field bound with
`structlog.contextvars`, such as a request's id, is in every log line of the request.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import structlog
from pydantic import ValidationError
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, WrappedLogger

from engine.host.logs import EXCEPTION, LogFormat, console_line, json_line

HIDDEN = "(hidden; --log-prompts shows it)"


def choose_format(log_format: str, stream: TextIO | None = None) -> LogFormat:
    """The meaning of "auto": console if the stream is a terminal, otherwise json."""
    if log_format == "auto":
        return "console" if (stream or sys.stderr).isatty() else "json"
    return "console" if log_format == "console" else "json"


def configure(
    level: str, log_format: LogFormat, *, log_prompts: bool = False, stream: TextIO | None = None
) -> logging.Handler:
    """Send all log records of this process to the stream.

    Args:
        level: debug, info, warning or error.
        log_format: the result of `choose_format`.
        log_prompts: whether a traceback may repeat text from a client or a model.
        stream: the output stream (default: stderr).

    Returns: The only handler of the root logger.
    """
    common: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *common,
            structlog.stdlib.PositionalArgumentsFormatter(),
            ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.ExtraAdder()],
            processors=[ProcessorFormatter.remove_processors_meta, _with_traceback(log_prompts), _renderer(log_format)],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # The service itself logs what uvicorn logs at info.
    quiet = logging.WARNING if level == "info" else logging.NOTSET
    logging.getLogger("uvicorn.error").setLevel(quiet)
    return handler


def _renderer(log_format: LogFormat) -> Callable[[WrappedLogger, str, EventDict], str]:
    render = json_line if log_format == "json" else console_line

    def line(logger: WrappedLogger, name: str, fields: EventDict) -> str:
        fields.pop("color_message", None)  # uvicorn's second record of the same event
        return render(fields)

    return line


def _with_traceback(log_prompts: bool) -> structlog.typing.Processor:
    def add(logger: WrappedLogger, name: str, fields: EventDict) -> EventDict:
        given = fields.pop("exc_info", None)
        problem = given[1] if isinstance(given, tuple) else given
        if given is True:
            problem = sys.exc_info()[1]
        if isinstance(problem, BaseException):
            fields[EXCEPTION] = traceback_text(problem, log_prompts=log_prompts)
        return fields

    return add


def traceback_text(problem: BaseException, *, log_prompts: bool = False) -> str:
    """The traceback as Python writes it. Without `log_prompts`, values that failed validation are left out, because
    they come from a client or a model."""
    text = "".join(traceback.format_exception(problem)).rstrip()
    if not log_prompts:
        for line, safe in _unsafe_lines(problem, set()):
            text = text.replace(line, safe)
    return text


def _validation_errors() -> tuple[type[BaseException], ...]:
    """pydantic's exceptions, and FastAPI's if it is imported; otherwise there can be none."""
    fastapi = sys.modules.get("fastapi.exceptions")
    return (ValidationError,) if fastapi is None else (ValidationError, fastapi.ValidationException)


def _unsafe_lines(problem: BaseException, seen: set[int]) -> Iterator[tuple[str, str]]:
    """The lines of the messages of this exception and of all exceptions shown with it, with their replacements."""
    seen.add(id(problem))
    if isinstance(problem, _validation_errors()):
        for line in str(problem).splitlines():
            # pydantic's lines end with [type=..., input_value=..., input_type=...]; FastAPI's are whole errors.
            kept, found, _ = line.partition(" [type=")
            if found:
                yield line, f"{kept} {HIDDEN}"
            elif "'input':" in line:
                yield line, f"  {HIDDEN}"
    parts: list[Any] = [problem.__cause__, problem.__context__]
    parts += problem.exceptions if isinstance(problem, BaseExceptionGroup) else []
    for part in parts:
        if isinstance(part, BaseException) and id(part) not in seen:
            yield from _unsafe_lines(part, seen)
