"""Texts cut into segments that a tokenizer encodes independently of each other.

The tokenizers library takes some added tokens, such as `<|im_end|>`, out of a text before it normalises or splits
anything. A text may therefore be cut before such a token: the joined ids of both parts are those of the whole text.
That does not hold for every added token: `cutting_tokens` says for which it does.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Protocol

LEAST = 1024  # characters of a segment that is followed by another; many short segments would cost more than they save


class AddedToken(Protocol):
    """An added token of the tokenizers library."""

    content: str
    lstrip: bool
    normalized: bool
    single_word: bool


def cutting_tokens(added: Collection[AddedToken], wanted: str) -> list[str]:
    """The added tokens before which any text may be cut.

    The tokenizer looks for such a token in the original text (not `normalized`). Neither this token nor a longer one
    that begins with it depends on the text before it (`single_word`) or absorbs spaces there (`lstrip`). No other token
    that is looked for in the original text extends over the cut: none contains a beginning of this one except at its
    own beginning. The first character is neither a space, which the token before might absorb, nor part of a word.
    """
    found = [token for token in added if token.content and not token.normalized]
    return [
        token.content
        for token in found
        if token.content in wanted
        and not re.match(r"\w|\s", token.content)
        and not any(_reaches_into(other.content, token.content) for other in found)
        and not any(other.lstrip or other.single_word for other in found if other.content.startswith(token.content))
    ]


def _reaches_into(token: str, following: str) -> bool:
    """Whether the end of a token can be the beginning of the following token, or contain all of it."""
    return any(token.startswith(following[: len(token) - start], start) for start in range(1, len(token)))


class Segmenter:
    """Cuts texts before certain tokens.

    Texts with the same beginning have the same segments there, except the last one.

    Args:
        tokens: the tokens at which to cut; see `cutting_tokens`.
        least: minimum characters of each segment but the last.
    """

    def __init__(self, tokens: Collection[str], least: int = LEAST):
        self._least = least
        longest_first = sorted(tokens, key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, longest_first))) if tokens else None

    def split(self, text: str) -> list[str]:
        """The segments of a text: the text itself if it cannot be cut."""
        if self._mark is None:
            return [text]
        cuts = [0]
        for mark in self._mark.finditer(text, self._least):
            if mark.start() - cuts[-1] >= self._least:
                cuts.append(mark.start())
        return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]
