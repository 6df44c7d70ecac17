"""Checks of single values from a body; errors name the field and the value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from server.errors import ApiError, shown

MAX_ID = 256  # characters


def fail(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    """Refuse a value. Raises ApiError: 400, always."""
    raise ApiError(400, message, param=param, code=code)


def read_text(item: Mapping[str, Any], name: str, where: str, *, least: int = 0, most: int | None = None) -> str:
    """A string of an object. Raises ApiError if the value is not a string, or has the wrong length.

    Args:
        least: minimum characters.
        most: maximum characters.
    """
    text, field = item.get(name), f"{where}.{name}"
    if not isinstance(text, str):
        fail(field, f"{field} must be a string, got {shown(text)}.")
    if len(text) < least or (most is not None and len(text) > most):
        limit = f"at most {most}" if most is not None and len(text) > most else f"at least {least}"
        fail(field, f"{field} must have {limit} characters, got {len(text)}.")
    return text


class Ignored(set[str]):
    """Names of ignored parts of a request, for a header and the log. `sees`: the model reads images, so they are not
    among these."""

    def __init__(self, *, sees: bool = False) -> None:
        super().__init__()
        self.sees = sees


class SentPicture(str):
    """The address of an image, in the place of a text."""

    __slots__ = ()


# A content part as text. Takes the part, its path, and the list of ignored names.
PartReader = Callable[[Mapping[str, Any], str, Ignored], str]


def text_in(name: str) -> PartReader:
    return lambda part, where, ignored: read_text(part, name, where)


def unseen(what: str, why: str = "this model reads text only") -> PartReader:
    """Returns a reader that replaces a part that the model cannot see by a note, so that a conversation can
    continue."""

    def read(part: Mapping[str, Any], where: str, ignored: Ignored) -> str:
        ignored.add(f"{where.partition('[')[0]}.{part['type']}")
        return f"[{what} was here; {why}.]"

    return read


def seen(address: Callable[[Mapping[str, Any], str], str | None]) -> PartReader:
    """Reads an image, or puts a note in its place if the model reads none. `address`: finds the image's address in a
    part; None: it has none."""

    def read(part: Mapping[str, Any], where: str, ignored: Ignored) -> str:
        if not ignored.sees:
            return unseen("An image")(part, where, ignored)
        found = address(part, where)
        return (
            SentPicture(found) if found is not None else unseen("An image", "it cannot be read")(part, where, ignored)
        )

    return read


def joined(parts: Sequence[str]) -> str | list[dict[str, Any]]:
    """The content of a chat message: texts joined with line breaks; as a list of parts if there are images."""
    if not any(isinstance(part, SentPicture) for part in parts):
        return "\n".join(parts)
    return [
        {"type": "image_url", "image_url": {"url": str(part)}}
        if isinstance(part, SentPicture)
        else {"type": "text", "text": part}
        for part in parts
    ]


def read_parts(content: Any, where: str, readers: Mapping[str, PartReader], ignored: Ignored) -> str:
    """Content that is a string or a list of parts; the parts' texts are joined with line breaks. Images are left out.
    Raises ApiError: names the first part that is invalid or of an unknown type. `ignored`: receives the names of parts
    that cannot be read."""
    note = unseen("An image", "images are not read here")
    parts = list_parts(content, where, readers, ignored)
    return "\n".join(note({"type": "image"}, where, ignored) if isinstance(one, SentPicture) else one for one in parts)


def list_parts(content: Any, where: str, readers: Mapping[str, PartReader], ignored: Ignored) -> list[str]:
    """The parts of content as texts and images; see `read_parts`."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        fail(where, f"{where} must be a string or a list of parts, got {shown(content)}.")
    return [read_part(part, f"{where}[{index}]", readers, ignored) for index, part in enumerate(content)]


def read_part(part: Any, where: str, readers: Mapping[str, PartReader], ignored: Ignored) -> str:
    """One part of a content as text; see `read_parts`."""
    if not isinstance(part, dict):
        fail(where, f"{where} must be an object with a type and a text, got {shown(part)}.")
    kind = part.get("type")
    read = readers.get(kind) if isinstance(kind, str) else None
    if read is None:
        message = f"{where}.type is {shown(kind)}, which is not supported here; only {', '.join(readers)} can be."
        fail(f"{where}.type", message, code="unsupported_parameter")
    return read(part, where, ignored)
