"""A model's vocabulary as bytes: what each token adds to a text, and how text in the middle of another becomes
tokens."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Sequence

from engine.errors import InvalidRequestError
from engine.text.tokenizer import Tokenizer

# Placed before a text that is to be tokenised as a continuation: no tokenizer joins it with what follows.
_BEFORE = "\x02"
_MOST_KEPT = 4096  # texts whose tokens are kept
_LONGEST = 128  # maximum bytes of a token in the greedy search, and of a text whose tokens are kept


class Vocabulary:
    """The tokens of a model in the form that llguidance expects (its `TokenizerWrapper`).

    Args:
        size: number of ids of the model; ids that the tokenizer does not know have no bytes, and are never allowed.
        eos_ids: tokens that end answers.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]):
        # the bytes of each token within a text, empty for tokens without bytes or whose bytes are not known; a caller
        # that has read them may empty the list, because the vocabulary keeps them in less memory
        self.tokens = [self._plain(found) for found in tokenizer.all_token_bytes(size)]
        special_ids = {token for token in tokenizer.special_token_ids if token < size}
        # tokens that no text stands for; a grammar can name them
        self.special_token_ids = sorted({*special_ids, *eos_ids})
        for token in self.special_token_ids:
            self.tokens[token] = self.tokens[token] or f"<[{token}]>".encode()
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self._tokenizer = tokenizer
        self._special = special = frozenset(self.special_token_ids)
        # Forced text is requested with each mask, and is mostly the same.
        self._written = functools.lru_cache(_MOST_KEPT)(self._write)
        single = {found for token, found in enumerate(self.tokens) if len(found) == 1 and token not in special}
        # whether each printable ASCII character has a token, so that any text can be written
        self.writes_all = all(bytes([value]) in single for value in range(32, 127))
        # the bytes of all tokens, one after the other, and where each token's end
        self._all, self._ends = b"".join(self.tokens), array("I", itertools.accumulate(map(len, self.tokens)))
        self._before = tokenizer.encode(_BEFORE, add_special_tokens=False)
        spaced = next((t for t, b in enumerate(self.tokens) if b[:1] == b" " and b.strip() and t not in special), None)
        # whether a text's first token loses its leading space
        self.opens_without_space = spaced is not None and not tokenizer.decode([spaced]).startswith(" ")

    @staticmethod
    def _plain(found: bytes | None) -> bytes:
        """The bytes that can be used: a first byte of 0xFF, which no text has, marks special tokens."""
        return b"" if found is None or found[:1] == b"\xff" else found

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text within another text, as the tokenizer writes it if that is known."""
        data = text.encode() if isinstance(text, str) else text
        return self._written(data).copy() if len(data) <= _LONGEST else self._write(data)

    def _write(self, data: bytes) -> list[int]:
        try:
            plain = data.decode()
            for before in ([], self._before):
                ids = self._tokenizer.encode(_BEFORE * bool(before) + plain, add_special_tokens=False)
                rest = ids[len(before) :]
                same = ids[: len(before)] == before and b"".join(map(self._bytes, rest)) == data
                if same and self._special.isdisjoint(rest):
                    return rest
        except (UnicodeDecodeError, InvalidRequestError):
            pass  # part of a character
        return self._greedy(data)

    def _bytes(self, token: int) -> bytes:
        if token >= len(self._ends):
            return b"\xff"
        return self._all[self._ends[token - 1] if token else 0 : self._ends[token]]

    @functools.cached_property
    def _ids(self) -> dict[bytes, int]:
        """The first token with these bytes. Few models ever need it."""
        ids: dict[bytes, int] = {}
        for token in range(len(self._ends)):
            if token not in self._special and (found := self._bytes(token)):
                ids.setdefault(found, token)
        return ids

    def _greedy(self, data: bytes) -> list[int]:
        """Repeatedly the longest token that fits, as long as there is one."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + _LONGEST), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is None:
                break
            ids.append(self._ids[data[start:end]])
            start = end
        return ids
