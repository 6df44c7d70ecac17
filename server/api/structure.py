"""Limits on the structure of a JSON body, checked before any object is built.

Text takes about as much memory as it has bytes, but structure takes up to 50 times as much: `{},` is three bytes and
becomes a dictionary of 64. So numpy first counts the structural characters outside of strings. It creates no objects,
and does not hold the interpreter's lock meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from server.errors import ApiError

# Enough for the largest sensible request: some thousands of messages with parts, or of pairs of texts.
MAX_CONTAINERS = 32768
MAX_MEMBERS = 65536
MAX_STRINGS = 131072
MAX_VALUE_DEPTH = 32  # maximum nesting of tools and other inputs of a template
MAX_VALUES = 16384  # maximum values in such a field
BYTES_PER_ELEMENT = 8  # bytes of the largest body per element: about those of a token id with its comma
_BLOCK = 1 << 20  # bytes at a time, so that the arrays for a block stay small


@dataclass(slots=True)
class Structure:
    """The structure of a JSON text, counted whether the text is valid or not.

    Attributes:
        containers: number of arrays and objects.
        members: number of names with a value in objects.
        strings: number of strings, including names.
        commas: number of elements and members, minus one for each array and object.
    """

    containers: int = 0
    members: int = 0
    strings: int = 0
    commas: int = 0


def measure(content: bytes) -> Structure:
    """Count the brackets and commas of a JSON text. Brackets and commas within strings do not count."""
    found, quotes = Structure(), 0
    inside = escaped = False
    for start in range(0, len(content), _BLOCK):
        block = np.frombuffer(content, np.uint8, min(_BLOCK, len(content) - start), start)
        quote = block == ord('"')
        escaped = _drop_escaped(block, quote, escaped)
        # An odd number of quotes up to and including this character: it is within a string.
        outside = ((np.cumsum(quote, dtype=np.uint8) + inside) & 1) == 0
        inside = not outside[-1]
        quotes += int(np.count_nonzero(quote))
        found.containers += _count(block, outside, "[") + _count(block, outside, "{")
        found.members += _count(block, outside, ":")
        found.commas += _count(block, outside, ",")
    found.strings = (quotes + 1) // 2
    return found


def _count(block: npt.NDArray[np.uint8], outside: npt.NDArray[np.bool_], sign: str) -> int:
    return int(np.count_nonzero((block == ord(sign)) & outside))


def _drop_escaped(block: npt.NDArray[np.uint8], quote: npt.NDArray[np.bool_], escaped: bool) -> bool:
    """Unmark quotes that a backslash escapes. `escaped`: whether a backslash before the block escapes its first byte.

    Returns: whether the block's last backslash escapes the first byte of the next block.
    """
    places = np.flatnonzero(block == ord("\\"))
    if escaped and not (places.size and places[0] == 0):
        quote[0] = False
    if not places.size:
        return False
    breaks = np.flatnonzero(np.diff(places) > 1)
    starts, ends = places[np.append(0, breaks + 1)], places[np.append(breaks, places.size - 1)]
    lengths = ends - starts + 1
    if escaped and starts[0] == 0:
        lengths[0] -= 1  # the first one is itself escaped
    after = ends[lengths % 2 == 1] + 1  # of two backslashes, the first escapes the second
    overhangs = bool(after.size) and int(after[-1]) == block.size
    quote[after[:-1] if overhangs else after] = False
    return overhangs


def check_structure(content: bytes, max_body_size: int) -> None:
    """Refuse a body whose structure would take far more memory than its bytes. Raises ApiError: 400 with the number
    that is too large and its limit.

    Args:
        content: a JSON text, valid or not.
        max_body_size: maximum bytes of a body; it determines how many elements a body may have.
    """
    found = measure(content)
    elements = max(max_body_size // BYTES_PER_ELEMENT, MAX_STRINGS)
    for name, count, limit in (
        ("arrays and objects", found.containers, MAX_CONTAINERS),
        ("fields of objects", found.members, MAX_MEMBERS),
        ("strings", found.strings, MAX_STRINGS),
        ("elements", found.commas + 1, elements),
    ):
        if count > limit:
            message = f"The body has {count} {name}, but at most {limit} are allowed. Send less in one request."
            raise ApiError(400, message, code="body_too_complex")


def check_value(value: Any, param: str) -> int:
    """Refuse a value that is nested too deeply or too large to be passed to a template or a grammar. Raises ApiError:
    400 with the number that is too large and its limit.

    Args:
        value: a parsed JSON value.
        param: the request's field with the value.

    Returns: The number of characters of its strings, including names.
    """
    characters = count = 0
    level: list[Any] = [value]
    for _ in range(MAX_VALUE_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, dict):
                characters += sum(map(len, item))
                below += item.values()
            elif isinstance(item, list):
                below += item
            elif isinstance(item, int) and not -(2**63) <= item < 2**64:
                raise _refused(param, f"contains an integer of {item.bit_length()} bits; at most 64 are allowed")
        count += len(below)
        if count > MAX_VALUES:
            raise _refused(param, f"contains more than {MAX_VALUES} values, which is the limit")
        if not below:
            return characters
        level = below
    raise _refused(param, f"is nested more than {MAX_VALUE_DEPTH} levels deep, which is the limit")


def _refused(param: str, reason: str) -> ApiError:
    return ApiError(400, f"{param} {reason}.", param=param, code="invalid_value")
