"""The tokens of a grammar's text, for the readers of GBNF and Lark."""

from __future__ import annotations

import re


def grammar_tokens(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """Pairs of a kind and a text.

    Args:
        pattern: one named group for each kind; matches of the group `space` are left out.

    Raises:
        ValueError: a part of the text matches nothing; names it.
    """
    found, at = [], 0
    while at < len(text):
        token = pattern.match(text, at)
        if token is None:
            raise ValueError(f"the grammar cannot be read at {text[at : at + 20]!r}")
        at, kind = token.end(), token.lastgroup or ""
        if kind != "space":
            found.append((kind, token.group()))
    return found
