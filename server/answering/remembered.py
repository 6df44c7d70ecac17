"""Remembers the token ids of prompt segments, so that only the new part of a conversation is tokenised."""

from __future__ import annotations

import functools
import os
import threading
from array import array
from collections import OrderedDict
from hashlib import blake2b

from engine.text.processor import Tokenizer
from server.answering.prompt import Room, count_beyond, encode_fitting, most_characters

MOST_BYTES = 16 * 1024 * 1024  # about 4 million tokens
_OVERHEAD = 256  # bytes of a segment in addition to its ids


class RememberedTokens:
    """Tokenises prompts and remembers their segments; the least recently used segments are dropped.

    A segment is identified by a keyed hash; its text is not kept. It is safe to use from several threads. `most_bytes`:
    limits the memory of all segments.
    """

    def __init__(self, tokenizer: Tokenizer, most_bytes: int = MOST_BYTES):
        self.tokenizer = tokenizer
        self.num_bytes = 0
        self._segmenter = tokenizer.segmenter()
        self._encode = functools.partial(tokenizer.encode, add_special_tokens=False)
        self._most_bytes = most_bytes
        self._key = os.urandom(32)
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str, room: Room, salt: str | None) -> list[int]:
        """The token ids of a prompt, equal to those of `encode_fitting`. `salt`: prompts with different salts share
        nothing, not even the time saved by tokenising. Raises ApiError if the text is far too long; InvalidRequestError
        if the text is not valid Unicode."""
        segments = self._segmenter.split(text)
        root = f"{salt or ''}\0".encode()
        names = [
            blake2b(root + segment.encode(errors="surrogatepass"), key=self._key, digest_size=16).digest()
            for segment in segments
        ]
        with self._lock:
            found = [self._known.get(name) for name in names]
            for name in reversed(names):  # later segments are dropped before it
                if name in self._known:
                    self._known.move_to_end(name)
        new = "".join(segment for segment, ids in zip(segments, found, strict=True) if ids is None)
        if len(text) > most_characters(room.tokens) or count_beyond(self._encode, new, room.tokens) is not None:
            return encode_fitting(self._encode, text, room)  # refused by the engine
        made = [
            array("i", self._encode(segment)) if ids is None else ids
            for segment, ids in zip(segments, found, strict=True)
        ]
        self._keep(dict(zip(names[:-1], made, strict=False)))  # the last segment will grow
        return [token for ids in made for token in ids]

    def _keep(self, made: dict[bytes, array[int]]) -> None:
        with self._lock:
            for name, ids in reversed(made.items()):
                if name not in self._known:
                    self._known[name] = ids
                    self.num_bytes += _size(ids)
            while self.num_bytes > self._most_bytes:
                self.num_bytes -= _size(self._known.popitem(last=False)[1])


def _size(ids: array[int]) -> int:
    return ids.itemsize * len(ids) + _OVERHEAD
