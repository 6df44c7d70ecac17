"""Splitting a grammar's text into tokens, for the readers of GBNF and Lark."""

from __future__ import annotations

import re


def grammar_tokens(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """Pairs of a token's kind and text. `pattern`: has one named group per kind; matches of the group `space` are
    skipped. Raises ValueError: names a part of the text that matches nothing."""
    found, at = [], 0
    while at < len(text):
        token = pattern.match(text, at)
        if token is None:
            raise ValueError(f"the grammar cannot be read at {text[at : at + 20]!r}")
        at, kind = token.end(), token.lastgroup or ""
        if kind != "space":
            found.append((kind, token.group()))
    return found
