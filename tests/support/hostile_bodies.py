"""Bodies of legal size that cost as much as they can, for every field of every endpoint, from the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

# What a body needs beside the field under attack.
REQUIRED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/classify": {"input": "a"},
    "/v1/fill-mask": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


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


def fields_of(document: dict[str, Any]) -> dict[str, list[str]]:
    """The fields of each endpoint's body, by its path, as the document has them."""
    found = {}
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is not None:
            schema = body["content"]["application/json"]["schema"]
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
            found[path] = list(schema["properties"])
    return found


def with_value(path: str, field: str, value: bytes) -> bytes:
    """An endpoint's body with this value in a field."""
    others = {name: item for name, item in REQUIRED[path].items() if name != field}
    head = json.dumps(others).encode().removesuffix(b"}")
    return head + (b"," if others else b"") + json.dumps(field).encode() + b":" + value + b"}"


def hostile(path: str, field: str, shape: str, size: int) -> Hostile:
    """One of them, of about that many bytes."""
    room = size - len(with_value(path, field, b""))
    return Hostile(path, field, shape, with_value(path, field, SHAPES[shape](room)))


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
