"""A tokenizer.json with a large vocabulary, read in less memory than the tokenizers library takes.

The library copies a file's merges several times while it reads them. Those of Gemma 3, with 262,144 tokens, take 340 MB
at most and leave 95, because what stays lies between what went. Built from Python's objects they take 230 and leave 75.
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
"""Bytes of a file that is read this way."""
_OPTIONS = frozenset(
    {
        "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback",
        "ignore_merges",
    }
)  # fmt: skip
# Within a text of JSON a quote comes after a backslash: this is no text.
_MERGES = re.compile(r'(?<!\\)"merges"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer of a file.

    Raises:
        Exception: the tokenizers library cannot read it.
    """
    if file.stat().st_size >= LARGE and (found := _built(file)) is not None:
        return found
    return Tokenizer.from_file(str(file))


def _built(file: Path) -> Tokenizer | None:
    """The tokenizer; None for a model that is no byte pairs, or is written in another way than expected."""
    try:
        content, merges = _parted(file.read_text(encoding="utf-8"))
    except (ValueError, IndexError, TypeError):
        return None
    give_back()
    model = content.pop("model", None)
    if not isinstance(model, dict) or model.pop("type", None) != "BPE" or model.pop("merges", None) != []:
        return None
    vocabulary = model.pop("vocab", None)
    if not isinstance(vocabulary, dict) or not model.keys() <= _OPTIONS:
        return None
    pairs = BPE(vocab=vocabulary, merges=merges, **{name: value for name, value in model.items() if value is not None})
    del vocabulary, merges
    added = content.pop("added_tokens", [])
    empty: dict[str, Any] = {"type": "BPE", "vocab": {}, "merges": []}
    made = Tokenizer.from_str(json.dumps(content | {"added_tokens": [], "model": empty}))
    made.model = pairs
    made.add_tokens([AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in added])
    return made


def _parted(text: str) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The content without its merges, and these, of which equal texts are one object.

    Raises:
        ValueError, IndexError, TypeError: it is no JSON, or has no merges in one place.
    """
    places = list(_MERGES.finditer(text))
    if len(places) != 1:
        raise ValueError("there are no merges, or several")
    read = json.JSONDecoder().raw_decode
    merges: list[tuple[str, str]] = []
    same: dict[str, str] = {}
    begin = at = places[0].end()
    while text[at := _skipped(text, at)] != "]":
        merge, at = read(text, at)
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        merges.append((same.setdefault(first, first), same.setdefault(second, second)))
    content = json.loads(text[:begin] + text[at:])
    if not isinstance(content, dict):
        raise ValueError("it is no object")
    return content, merges


def _skipped(text: str, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return at if found is None else found.end()
