"""Small checks of values from a body, whose errors name the field and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from server.errors import ApiError, shown

MAX_ID = 256  # characters


def fail(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    """Refuse a field.

    Raises:
        ApiError: 400, always.
    """
    raise ApiError(400, message, param=param, code=code)


def read_text(item: Mapping[str, Any], name: str, where: str, *, least: int = 0, most: int | None = None) -> str:
    """A string of an object.

    Args:
        where: the object.
        least: characters, as many as it must have.
        most: characters that it may have.

    Raises:
        ApiError: it is none, or its length is wrong.
    """
    text, field = item.get(name), f"{where}.{name}"
    if not isinstance(text, str):
        fail(field, f"{field} must be a string, got {shown(text)}.")
    if len(text) < least or (most is not None and len(text) > most):
        limit = f"at most {most}" if most is not None and len(text) > most else f"at least {least}"
        fail(field, f"{field} must have {limit} characters, got {len(text)}.")
    return text


def read_parts(content: Any, where: str, kinds: Mapping[str, str]) -> str:
    """Content that is a string, or a list of parts with text, which are joined with line breaks.

    Args:
        kinds: types of parts that are read, with the field that holds their text.

    Raises:
        ApiError: names the first part that is wrong, or of another type.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fail(where, f"{where} must be a string or a list of parts, got {shown(content)}.")
    return "\n".join(_read_part(part, f"{where}[{index}]", kinds) for index, part in enumerate(content))


def _read_part(part: Any, where: str, kinds: Mapping[str, str]) -> str:
    if not isinstance(part, dict):
        fail(where, f"{where} must be an object with a type and a text, got {shown(part)}.")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        message = f"{where}.type is {shown(kind)}, which is not supported here; only {', '.join(kinds)} can be."
        fail(f"{where}.type", message, code="unsupported_parameter")
    return read_text(part, kinds[kind], where)
