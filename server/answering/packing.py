"""Values that wait in little memory until an answer needs them."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def packed(value: object) -> bytes:
    """A value as MessagePack. An `Encoding` has about 12 bytes a token there, instead of 200."""
    return msgspec.msgpack.encode(value)


def unpacked(data: bytes, kind: type[T]) -> T:
    """The value again."""
    return msgspec.msgpack.decode(data, type=kind)
