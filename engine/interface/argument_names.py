"""Errors and log lines that name Python's arguments: `max_model_len`, where the command line says --max-model-len."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from types import FunctionType
from typing import Any, TypeVar

from engine.config import EngineConfig
from engine.errors import OctavoError

C = TypeVar("C", bound=type)

_VALUE = r"none|stored|int8|int4|fp8|cpu|cuda(?::\w+)?|bfloat16|float16|float32"
_FLAG = re.compile(rf"--([a-z][a-z0-9-]*[a-z0-9])(?: \((\w+) of LLM\))?(?: ({_VALUE})\b(?! or ))?")
_ARGUMENTS = frozenset(field.name for field in fields(EngineConfig))


def as_arguments(text: str) -> str:
    """The text with the flags of `octavo serve` replaced by the arguments of `LLM`."""

    def renamed(match: re.Match[str]) -> str:
        name, value = match[1].replace("-", "_"), match[3]
        if name not in _ARGUMENTS:
            return match[0]
        return name if value is None else f'{name}="{value}"'

    return _FLAG.sub(renamed, text)


def names_arguments(kind: C) -> C:
    """Make the public methods of a class, and its `__init__`, name arguments instead of flags in their errors
    and in the log lines of their calls."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, _naming(method))
    return kind


@contextmanager
def _logging_arguments() -> Iterator[None]:
    make = logging.getLogRecordFactory()

    def make_renamed(*args: Any, **given: Any) -> logging.LogRecord:
        record = make(*args, **given)
        if record.name.startswith("octavo"):
            record.msg = _renamed(record.msg)
            if isinstance(record.args, tuple):
                record.args = tuple(map(_renamed, record.args))
        return record

    logging.setLogRecordFactory(make_renamed)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def _renamed(part: Any) -> Any:
    return as_arguments(part) if isinstance(part, str) else part


def _naming(method: FunctionType) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        try:
            with _logging_arguments():
                return method(*args, **given)
        except OctavoError as error:
            error.args = (as_arguments(str(error)), *error.args[1:])
            raise

    return call
