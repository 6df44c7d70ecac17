"""Requests that are answered with an error of their own, whatever else happens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from soaking.cases import CHAT, COMPLETIONS, EMBEDDINGS

_LENGTH, _CHUNKED = b"Content-Length: %d\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request and the statuses that may answer it."""

    name: str
    bytes: bytes
    statuses: frozenset[int]


def malformed(largest_body: int) -> list[Malformed]:
    """Some of each kind; `largest_body` is what the service accepts, in bytes."""
    return [
        *(_body(name, path, body) for name, path, body in _bodies()),
        Malformed("too_large", _HEAD + _LENGTH % (largest_body + 1) + b" " * 4096, frozenset({413})),
        Malformed("too_large_in_chunks", _HEAD + _CHUNKED + _chunks(largest_body), frozenset({413})),
        Malformed("no_http", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", frozenset({400})),
        Malformed("two_lengths", _HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", frozenset({400})),
        Malformed("huge_header", _HEAD + b"X-Filler: " + b"a" * (80 << 10) + b"\r\n\r\n", frozenset({431})),
    ]


def _bodies() -> Iterator[tuple[str, str, bytes]]:
    yield "no_json", COMPLETIONS, b'{"prompt": "a",'
    yield "no_utf8", COMPLETIONS, b'{"prompt": "\xff\xfe"}'
    yield "no_object", COMPLETIONS, b"[1, 2, 3]"
    yield "deep", CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    yield "nothing", COMPLETIONS, b""
    for name, path, body in (
        ("wrong_type", COMPLETIONS, {"prompt": {"text": "a"}}),
        ("negative", COMPLETIONS, {"prompt": "a", "max_tokens": -1}),
        ("too_long", COMPLETIONS, {"prompt": "a", "max_tokens": 1 << 30}),
        ("many_wrong", COMPLETIONS, {"prompt": "a", "stop": [1] * 500}),
        ("no_messages", CHAT, {"messages": []}),
        ("wrong_model", CHAT, {"model": "none", "messages": [{"role": "user", "content": "a"}]}),
        ("no_input", EMBEDDINGS, {"input": []}),
        ("unknown_token", COMPLETIONS, {"prompt": [1 << 30]}),
    ):
        yield name, path, json.dumps(body).encode()


def _body(name: str, path: str, body: bytes) -> Malformed:
    head = _HEAD.replace(COMPLETIONS.encode(), path.encode())
    return Malformed(name, head + _LENGTH % len(body) + body, frozenset({400, 404, 422}))


def _chunks(size: int) -> bytes:
    piece = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    return piece * (size // 0x8000 + 2)
