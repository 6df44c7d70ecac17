"""The rules by which byte-level tokenizers split texts before they merge bytes, by llama.cpp's names."""

from __future__ import annotations

from typing import Any

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    """Words with the character before them, this many digits, other signs with line ends after them, and blanks."""
    return rf"{_CONTRACTIONS}|{_WORD}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(after: str, digits: str) -> str:
    """Words in which no capital follows a small letter, with their possible endings."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_LLAMA_3, _QWEN_2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_QWEN_3_5 = _QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_GPT_4O = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_PATTERNS = {
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "llama-bpe": _LLAMA_3,
    "falcon3": _LLAMA_3,
    "falcon-h1": _LLAMA_3,
    "lfm2": _LLAMA_3,
    "pixtral": _LLAMA_3,
    "smaug-bpe": _LLAMA_3,
    "dbrx": _LLAMA_3,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "megrez": _QWEN_2,
    "stablelm2": _QWEN_2,
    "qwen35": _QWEN_3_5,
    "tekken": _cased("", r"\p{N}"),
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
}
_GPT_2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo"})
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})
_WHOLE = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral", "tekken"})

MERGES_LAST = _WHOLE
"""A piece that is in the vocabulary as a whole is one token, whatever the merges say."""
BEGINS = _WHOLE
"""Texts begin with the BOS token unless the file says otherwise."""


def splitter(name: str | None) -> dict[str, Any] | None:
    """The `pre_tokenizer` of a tokenizer.json; None for an unknown name."""
    octets = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if name in _GPT_2:
        return octets
    if name in _SINGLE_DIGITS:
        return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, octets]}
    if name not in _PATTERNS:
        return None
    split = {"type": "Split", "pattern": {"Regex": _PATTERNS[name]}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, octets | {"use_regex": False}]}


def normalizer(name: str | None) -> dict[str, Any] | None:
    """The `normalizer` of a tokenizer.json. Qwen's composes characters, which llama.cpp does not do."""
    return {"type": "NFC"} if name in ("qwen2", "qwen35") else None
