"""Bodies of legal size that cost as much as they can, for every field of every endpoint, from the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


def _repeated(item: bytes, before: bytes = b"[", after: bytes = b"]") -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        count = max((size - len(before) - len(after)) // (len(item) + 1), 1)
        return before + b",".join([item] * count) + after

    return make


def _numbered(item: bytes, before: bytes, after: bytes) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        count = max(size // (len(item % 1_000_000) + 1), 1)
        return before + b",".join([item % (number % 10_000_000) for number in range(count)]) + after

    return make


def _text(unit: bytes) -> Callable[[int], bytes]:
    return lambda size: b'"' + unit * ((size - 2) // len(unit)) + b'"'


MESSAGE = b'{"role":"user","content":"a"}'
# Values, by how large they are to be.
SHAPES: dict[str, Callable[[int], bytes]] = {
    "empty strings": _repeated(b'""'),
    "strings": _repeated(b'"ab"'),
    "ones": _repeated(b"1"),
    "ids": _repeated(b"257"),
    "negative": _repeated(b"-1"),
    "floats": _repeated(b"1.5"),
    "nulls": _repeated(b"null"),
    "lists of one": _repeated(b"[1]"),
    "empty lists": _repeated(b"[]"),
    "empty objects": _repeated(b"{}"),
    "objects": _repeated(b'{"a":1}'),
    "messages": _repeated(MESSAGE),
    "texts": _repeated(b'{"text":"a"}'),
    "parts": _repeated(b'{"type":"text","text":"a"}', b'[{"role":"user","content":[', b"]}]"),
    "long lists of ids": lambda size: _repeated(_repeated(b"257")(4096))(size),
    "keys": _numbered(b'"%d":1', b"{", b"}"),
    "keys of lists": _numbered(b'"%d":[]', b"{", b"}"),
    "distinct strings": _numbered(b'"%d"', b"[", b"]"),
    "distinct ids": _numbered(b"%d", b"[", b"]"),
    "nested": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "half nested": lambda size: b"[" * size,
    "nested objects": lambda size: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
    "digits": lambda size: b"9" * size,
    "text": _text(b"hello, "),
    "text without spaces": _text(b"a"),
    "spaces": _text(b" "),
    "emoji": _text("😀".encode()),
    "one emoji": lambda size: b'"' + "😀".encode() + b"a" * (size - 6) + b'"',
    "escapes": _text(b"\\u00e9"),
    "escaped emoji": _text(b"\\ud83d\\ude00"),
    "quotes": _text(b'\\"'),
    "backslashes": _text(b"\\\\"),
    "marks": _text("\u0301".encode()),
    "zeros": _text(b"\\u0000"),
    "half a string": lambda size: b'"' + b"a" * size,
}


@dataclass(frozen=True, slots=True)
class Hostile:
    """A request that may be answered in any way, but must not hurt others."""

    path: str
    field: str
    shape: str
    body: bytes

    def __str__(self) -> str:
        return f"{self.path} {self.field}: {self.shape}, {len(self.body)} bytes"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One that takes a body, as the API's document has it.

    Attributes:
        fields: names of the body's.
        example: the first body that the document shows.
    """

    path: str
    fields: tuple[str, ...]
    example: dict[str, Any]

    def hostile(self, field: str, shape: str, size: int) -> Hostile:
        """The example with such a value in a field, of about that many bytes."""
        others = {name: value for name, value in self.example.items() if name != field}
        others |= dict.fromkeys(others.keys() & {"max_tokens", "max_completion_tokens", "max_output_tokens"}, 1)
        head = json.dumps(others).encode().removesuffix(b"}")
        before = head + (b"," if others else b"") + json.dumps(field).encode() + b":"
        return Hostile(self.path, field, shape, before + SHAPES[shape](size - len(before) - 1) + b"}")


def endpoints_of(document: dict[str, Any]) -> dict[str, Endpoint]:
    """The endpoints that take bodies, by their path."""
    found = {}
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is not None and "application/json" in body["content"] and "{" not in path:
            content = body["content"]["application/json"]
            schema = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
            example = next(iter(content["examples"].values()))["value"]
            found[path] = Endpoint(path, tuple(schema["properties"]), example)
    return found


def outside_of_fields(size: int) -> Iterator[Hostile]:
    """What is wrong with a body as a whole."""
    path = "/v1/completions"
    head = b'{"prompt":"a","max_tokens":1'
    wholes = {
        "unknown fields": _numbered(b'"x%d":1', head + b",", b"}")(size - 40),
        "unknown fields with lists": _numbered(b'"x%d":[]', head + b",", b"}")(size - 40),
        "the same field": _repeated(b'"x":[1]', head + b",", b"}")(size - 40),
        "an array": SHAPES["lists of one"](size),
        "white space": b" " * (size - len(head) - 1) + head + b"}",
        "white space at the end": head + b"}" + b"\n" * (size - len(head) - 1),
        "no JSON": b"\x00" * size,
        "no UTF-8": b'{"prompt":"' + b"\xff" * (size - 13) + b'"}',
        "commas": b"," * size,
        "quotes": b'"' * size,
        "colons": b":" * size,
        "backslashes": b"\\" * size,
    }
    for name, body in wholes.items():
        yield Hostile(path, "the whole", name, body)
