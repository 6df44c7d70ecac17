"""The parts of a GGUF file: metadata, and the positions of its tensors. The reader trusts nothing in the file: it
compares each count and each position with the existing bytes before it builds anything from it."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.gguf.blocks import BlockFormat, find_format

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32

_SCALARS: dict[int, tuple[str, int]] = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("B", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
"""Kinds of values with a fixed size: their `struct` codes and bytes."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_KEY = 8 + 4 + 1  # a length, a kind, and a value of one byte
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8  # a length, the number of dimensions, one of them, a format, an offset
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 18
_MOST_NAME = 1 << 16
_MOST_TEXT = 1 << 24
_MOST_ITEMS = 1 << 24
_MOST_TEXTS = 1 << 22
_MOST_SIZES = 4
_LONGEST_ALIGNMENT = 1 << 16

Value = int | float | bool | str | list[Any]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]  # rows first, as in torch; the file has the reverse order
    format: BlockFormat
    # begin, size: its bytes in the file
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """The header of a file."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


def read_gguf(path: Path, *, vocabulary: bool = True) -> Gguf:
    """Read the header of a file; no tensor is read. Without `vocabulary`, lists about the tokenizer are empty, which
    saves most of the time. Raises ModelLoadError if it is not a GGUF file, or it is damaged or incomplete;
    UnsupportedModelError if its version, or a format in it, is unknown. PermissionError if the file is not readable."""
    try:
        with path.open("rb") as file:
            if (magic := file.read(4)) != MAGIC:
                raise ModelLoadError(f"{path} is not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, vocabulary).read()
    except PermissionError:
        raise
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read ({error}).") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, vocabulary: bool):
        self._path = path
        self._skipped = () if vocabulary else ("tokenizer.",)
        self._data = data
        self._size = len(data)
        self._place = len(MAGIC)
        self._items = 0  # items of all arrays so far
        self._texts = 0  # of these, the texts

    def read(self) -> Gguf:
        version = self._version()
        num_tensors = self._count("tensors", _LEAST_TENSOR, _MOST_TENSORS)
        num_keys = self._count("metadata entries", _LEAST_KEY, _MOST_KEYS)
        metadata: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._text("a metadata key", _MOST_NAME)
            if key in metadata:
                self._fail(f"its metadata holds {_shown(key)} twice")
            metadata[key] = self._value(key)
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or not 8 <= alignment <= _LONGEST_ALIGNMENT or alignment & alignment - 1:
            self._fail(
                f"general.alignment must be a power of two from 8 to {_LONGEST_ALIGNMENT}, but is {_shown(alignment)}"
            )
        listed = [self._tensor() for _ in range(num_tensors)]
        start = -(-self._place // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, format, offset in listed:
            if name in tensors:
                self._fail(f"it holds the tensor {_shown(name)} twice")
            if offset % alignment:
                self._fail(f"the tensor {_shown(name)} begins at {offset}, which is not a multiple of {alignment}")
            size = math.prod(shape) // format.numbers * format.size
            if size > self._size - start - offset:
                self._fail(
                    f"the tensor {_shown(name)} takes {size} bytes from byte {start + offset} on, but the file has "
                    f"{self._size}"
                )
            tensors[name] = TensorInfo(name, shape, format, start + offset, size)
        return Gguf(self._path, version, metadata, tensors)

    def _version(self) -> int:
        version: int = self._scalar("I", 4, "its version")
        if version in VERSIONS:
            return version
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (1, *VERSIONS):
            raise UnsupportedModelError(
                f"{self._path} is a big-endian GGUF file; only little-endian files are supported. Convert it with "
                "llama.cpp's gguf_convert_endian.py."
            )
        raise UnsupportedModelError(
            f"{self._path} is GGUF version {version}; versions {' and '.join(map(str, VERSIONS))} are supported. "
            f"Convert it again with a newer llama.cpp, or download it again."
        )

    def _count(self, what: str, least: int, most: int) -> int:
        """The number of items that follow, each of at least this many bytes."""
        count: int = self._scalar("Q", 8, f"the number of its {what}")
        room = (self._size - self._place) // least
        if count > min(room, most):
            limit = f"at most {most} are allowed" if count > most else f"it has room for only {room}"
            self._fail(f"it says that it has {count} {what}, but {limit}")
        return count

    def _value(self, key: str) -> Value:
        kind: int = self._scalar("I", 4, f"the kind of {_shown(key)}")
        if kind in _SCALARS:
            value = self._scalar(*_SCALARS[kind], f"the value of {_shown(key)}")
            return bool(value) if kind == _BOOL else value
        if kind == _STRING:
            return self._text(f"the value of {_shown(key)}", _MOST_TEXT)
        if kind == _ARRAY:
            return self._array(key)
        self._fail(f"the value of {_shown(key)} is of the kind {kind}, which GGUF does not have")

    def _array(self, key: str) -> list[Any]:
        kind: int = self._scalar("I", 4, f"the kind of the values of {_shown(key)}")
        if kind == _ARRAY:
            self._fail(f"{_shown(key)} holds arrays within an array, which no model needs")
        if kind != _STRING and kind not in _SCALARS:
            self._fail(f"{_shown(key)} holds values of the kind {kind}, which GGUF does not have")
        letter, size = _SCALARS.get(kind, ("", 8))
        count = self._count(f"values of {_shown(key)}", size, _MOST_ITEMS)
        self._items += count
        self._texts += count if kind == _STRING else 0
        if self._items > _MOST_ITEMS or self._texts > _MOST_TEXTS:
            self._fail(f"its arrays hold more than {_MOST_ITEMS} values, or more than {_MOST_TEXTS} texts")
        kept = not key.startswith(self._skipped)
        if kind == _STRING:
            return self._texts_of(key, count, kept)
        if not kept:
            self._pass(count * size, f"the values of {_shown(key)}")
            return []
        found = struct.unpack(f"<{count}{letter}", self._take(count * size, f"the values of {_shown(key)}"))
        return [bool(value) for value in found] if kind == _BOOL else list(found)

    def _texts_of(self, key: str, count: int, kept: bool) -> list[str]:
        """A vocabulary has hundreds of thousands of texts; reading each by `_text` would take seconds. None of them is
        decoded unless they are kept."""
        data, size, place, found = self._data, self._size, self._place, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            length = length_at(data, place)[0] if place + 8 <= size else _MOST_TEXT + 1
            if length > _MOST_TEXT or length > size - place - 8:
                self._place = place
                self._text(f"a value of {_shown(key)}", _MOST_TEXT)  # raises the error
            begin, place = place + 8, place + 8 + length
            if not kept:
                continue
            try:
                found.append(data[begin:place].decode())
            except UnicodeDecodeError as error:
                self._fail(f"a value of {_shown(key)} is not UTF-8 text ({error.reason})")
        self._place = place
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockFormat, int]:
        name = self._text("a tensor's name", _MOST_NAME)
        count: int = self._scalar("I", 4, f"the number of sizes of {_shown(name)}")
        if not 1 <= count <= _MOST_SIZES:
            self._fail(f"the tensor {_shown(name)} has {count} dimensions; 1 to {_MOST_SIZES} are possible")
        what = f"the position of the tensor {_shown(name)}"
        sizes = [self._scalar("Q", 8, what) for _ in range(count)]
        kind: int = self._scalar("I", 4, what)
        offset: int = self._scalar("Q", 8, what)
        format = find_format(kind)
        if format is None:
            raise UnsupportedModelError(
                f"{self._path}: the tensor {_shown(name)} is stored in the unknown format {kind}."
            )
        if not all(sizes) or math.prod(sizes) > self._size * format.numbers:  # Python's integers have no limit
            self._fail(
                f"the tensor {_shown(name)} has the sizes {sizes}, which is more than the file contains, or zero"
            )
        if sizes[0] % format.numbers:
            self._fail(
                f"the tensor {_shown(name)} has rows of {sizes[0]} numbers, which is not a multiple of "
                f"{format.numbers}, the size of a block of {format.name}"
            )
        return name, tuple(reversed(sizes)), format, offset

    def _text(self, what: str, most: int) -> str:
        length: int = self._scalar("Q", 8, f"the length of {what}")
        if length > most:
            self._fail(f"{what} is said to be {length} bytes long; at most {most} are read")
        try:
            return bytes(self._take(length, what)).decode()
        except UnicodeDecodeError as error:
            self._fail(f"{what} is not UTF-8 text ({error.reason})")

    def _scalar(self, letter: str, size: int, what: str) -> Any:
        return struct.unpack("<" + letter, self._take(size, what))[0]

    def _take(self, size: int, what: str) -> bytes:
        self._pass(size, what)
        return self._data[self._place - size : self._place]

    def _pass(self, size: int, what: str) -> None:
        if size > self._size - self._place:
            self._fail(
                f"the file ends before {what}: {size} bytes are needed from byte {self._place} on, and the file has "
                f"{self._size}"
            )
        self._place += size

    def _fail(self, what: str) -> NoReturn:
        raise ModelLoadError(f"{self._path} is damaged or incomplete: {what}. Download it again.")


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:80] + "..."
