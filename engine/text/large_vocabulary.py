"""Reads a tokenizer.json with a large vocabulary in less memory than the tokenizers library needs.

The library copies a file's merges several times while it reads them. The merges of Gemma 3, with 262,144 tokens, take
up to 340 MB while they load, and 95 MB afterwards, because freed memory lies between memory in use. Built from Python
objects, they take 230 MB and then 75 MB.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from engine.host.resident import give_back

LARGE = 4 << 20
"""The size in bytes from which a file is read this way."""
_OPTIONS = frozenset(
    {
        "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
        "ignore_merges",
    }
)  # fmt: skip
# In a JSON string, a quote comes after a backslash, so this is not in a string.
_MERGES = re.compile(r'(?<!\\)"merges"\s*:\s*\[')
_TOKEN = frozenset({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"})
_COMMENT = "#version"  # the library skips merges that are strings and begin with it
_BETWEEN = re.compile(r"[\s,]*")
_PIECE = 1 << 16  # characters of merges that are parsed together
_CLOSING = {"[": "],", '"': '",'}  # the end of a merge and the comma after it, by the merge's first character


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a file. Raises Exception if the tokenizers library cannot read it."""
    if file.stat().st_size >= LARGE and (found := _built(file)) is not None:
        return found
    return Tokenizer.from_file(str(file))


def _built(file: Path) -> Tokenizer | None:
    """The tokenizer; None if the model is not byte-pair encoding, or is written in an unexpected way."""
    try:
        content, merges = _parted(file.read_text(encoding="utf-8"))
    except (ValueError, IndexError, TypeError):
        return None
    give_back()
    model = content.pop("model", None)
    if not isinstance(model, dict) or model.pop("type", None) != "BPE" or model.pop("merges", None) != []:
        return None
    vocabulary = model.pop("vocab", None)
    added = content.pop("added_tokens", [])
    if not isinstance(vocabulary, dict) or not model.keys() <= _OPTIONS or not _are_tokens(added):
        return None
    options = {name: value for name, value in model.items() if value is not None}
    try:
        pairs = BPE(vocab=vocabulary, merges=merges, **options)
    except Exception:  # errors of many kinds; the library itself then says what is wrong in the file
        return None
    del vocabulary, merges
    empty: dict[str, Any] = {"type": "BPE", "vocab": {}, "merges": []}
    made = Tokenizer.from_str(json.dumps(content | {"added_tokens": [], "model": empty}))
    made.model = pairs
    made.add_tokens([AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in added])
    return made


def _are_tokens(added: object) -> bool:
    """Whether these are added tokens in the form that the library writes."""
    return isinstance(added, list) and all(isinstance(token, dict) and token.keys() == _TOKEN for token in added)


def _parted(text: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The content without its merges, and the merges, in which equal strings share one object. Raises ValueError,
    IndexError, TypeError if the file is not JSON, or does not have its merges in one place."""
    places = list(_MERGES.finditer(text))
    if len(places) != 1:
        raise ValueError("there are no merges, or several")
    read = json.JSONDecoder().raw_decode
    merges: list[tuple[str, str]] = []
    same: dict[str, str] = {}
    begin = at = places[0].end()
    forms: set[type] = set()
    singly = begin  # merges before this position are parsed one by one
    while text[at := _skipped(text, at)] != "]":
        some, end = _piece(text, at) if at >= singly else ([], at)
        if not some:
            singly = max(singly, at + _PIECE)
            merge, end = read(text, at)
            some = [merge]
        at = end
        for merge in some:
            forms.add(type(merge))
            if isinstance(merge, str):
                if merge.startswith(_COMMENT):
                    continue
                merge = merge.split(" ")
            elif not isinstance(merge, list):
                raise ValueError("a merge is neither a text nor a list")
            first, second = merge
            merges.append((same.setdefault(first, first), same.setdefault(second, second)))
    if len(forms) > 1:
        raise ValueError("merges are texts and lists")
    content = json.loads(text[:begin] + text[at:])
    if not isinstance(content, dict):
        raise ValueError("it is not an object")
    return content, merges


def _piece(text: str, at: int) -> tuple[list[Any], int]:
    """The merges from this place on, and the place behind them. No merges if they cannot be parsed together: the list
    ends among them, or the piece ends within a token."""
    end = text.rfind(_CLOSING.get(text[at], "\0"), at, at + _PIECE)
    try:
        return ([] if end < 0 else json.loads(f"[{text[at : end + 1]}]")), end + 1
    except ValueError:
        return [], at


def _skipped(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return at if found is None else found.end()
