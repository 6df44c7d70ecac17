"""The bytes of GGUF files, sound or not."""

from __future__ import annotations

import struct

U32, F32, BOOL, TEXT, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    octets = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(octets)) + octets


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def file_of(
    entries: list[bytes], tensors: list[bytes], data: bytes = b"", *, start: bytes = b"GGUF", version: int = 3,
    alignment: int = 32, counts: tuple[int, int] | None = None,
) -> bytes:  # fmt: skip
    numbers = counts or (len(tensors), len(entries))
    head = start + struct.pack("<IQQ", version, *numbers) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
