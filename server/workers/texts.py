"""Turns long texts into token ids. This is a worker's job, because a tokenizer may take 200 bytes of memory per
character."""

from __future__ import annotations

import functools

import msgspec
import tokenizers


class TextInput(msgspec.Struct, array_like=True):
    """The input."""

    tokenizer: str  # the path of a tokenizer.json
    text: str
    special: bool  # whether the tokenizer adds its special tokens


def tokenize(text: TextInput) -> list[int]:
    """The text's token ids."""
    ids: list[int] = _load(text.tokenizer).encode(text.text, add_special_tokens=text.special).ids
    return ids


@functools.lru_cache(maxsize=1)
def _load(path: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(path)
