"""Converting token ids to text as they arrive.

Decoding is not additive: a tokenizer strips the space at the very beginning, spreads one character over several tokens,
and joins or separates words depending on what comes before them. So new tokens are decoded after a few settled ones,
the context. The context's text is then cut off.

`tokenizers.decoders.DecodeStream` cannot be used: it raises an exception if byte-fallback tokens are not valid UTF-8,
never returns a character that the end leaves unfinished, and does not support tokenizers written in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"

# The maximum number of settled tokens that are kept; the context is a suffix of them.
MAX_CONTEXT = 8
# A UTF-8 character has at most 4 bytes, hence at most 4 tokens: if more than that are pending and the text ends in
# U+FFFD, it will never be complete.
CHARACTER = 4
MAX_PENDING = 2 * CHARACTER
# Tokens of one delta that are decoded in one call.
BLOCK = 32


class Detokenizer:
    """Incremental text of one choice.

    The text depends only on the token ids, not on how they are divided into deltas, and equals what the tokenizer
    decodes in context, with one exception. If byte-fallback tokens are not valid UTF-8, characters that were complete
    before the fault stay unchanged; the tokenizer itself would replace the whole run of bytes, including what has been
    streamed. A token costs a bounded number of decodings of a bounded number of tokens.

    Args:
        decode: converts all ids to text and hides none.
        prompt: the last tokens before the answer, without special tokens; may be empty.
    """

    __slots__ = ("_context", "_context_text", "_decode", "_given", "_history", "_pending")

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        # Settled ids, at most MAX_CONTEXT; a suffix of them is the context.
        self._history: list[int] = []
        self._context: list[int] = []
        self._context_text = ""
        # Ids whose text is not certain yet, and the part of their text that has been returned already.
        self._pending: list[int] = []
        self._given = ""
        if prompt:
            self._begin(list(prompt[-MAX_CONTEXT - CHARACTER :]))

    def append(self, ids: Sequence[int]) -> str:
        """Add ids; returns the text that became certain (possibly empty)."""
        if len(ids) == 1:
            return self._append_one(ids[0])
        blocks = (list(ids[start : start + BLOCK]) for start in range(0, len(ids), BLOCK))
        return "".join(map(self._append_block, blocks))

    def finish(self) -> str:
        """The text that is still pending, when no more ids will come: U+FFFD where it is incomplete."""
        if not self._pending:
            return ""
        return self._settle(self._pending_text(self._decode(self._context + self._pending)))

    def _begin(self, prompt: list[int]) -> None:
        """Take the prompt's end as the context. The answer may still complete a character that the prompt leaves
        unfinished, so that character's tokens are pending and their U+FFFD counts as returned."""
        for unfinished in range(CHARACTER):
            settled = prompt[: len(prompt) - unfinished]
            self._remember(settled)
            if not self._context_text.endswith(REPLACEMENT):
                self._pending = prompt[len(settled) :]
                self._given = self._pending_text(self._decode(self._context + self._pending))
                return
        self._remember(prompt)

    def _remember(self, settled: list[int]) -> None:
        """Choose the context: the shortest suffix that begins and ends with a whole character and is not blank (a blank
        beginning would absorb the next token's space)."""
        self._history = settled[-MAX_CONTEXT:]
        self._context, self._context_text = [], ""
        for size in range(1, len(self._history) + 1):
            self._context = self._history[-size:]
            self._context_text = text = self._decode(self._context)
            if text.strip() and REPLACEMENT not in text:
                return

    def _forget(self) -> None:
        self._history, self._context, self._context_text = [], [], ""

    def _append_block(self, block: list[int]) -> str:
        """Append all of `block` in one decoding; if that might differ from one token at a time, append each half."""
        if len(block) == 1:
            return self._append_one(block[0])
        ids = self._pending + block
        text = self._decode(self._context + ids)
        new = text[len(self._context_text) :]
        if text.startswith(self._context_text) and new.startswith(self._given) and REPLACEMENT not in new:
            self._pending = ids
            return self._settle(new)
        half = len(block) // 2
        return self._append_block(block[:half]) + self._append_block(block[half:])

    def _append_one(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        if not text.endswith(REPLACEMENT):
            return self._settle(self._pending_text(text))
        if len(self._pending) < MAX_PENDING:
            return self._give_certain(text)
        return self._cut(self._pending_text(text))

    def _pending_text(self, text: str) -> str:
        """The text that the pending ids add to the context; `text` is that of both. If the new ids change the context's
        text, which has been returned already, they are decoded separately."""
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        self._forget()
        return self._decode(self._pending)

    def _settle(self, text: str) -> str:
        """Make this the final text of all pending ids. Returns the part that has not been returned yet."""
        piece = self._beyond_given(text)
        settled, self._pending, self._given = self._pending, [], ""
        self._remember(self._history + settled)
        return piece

    def _beyond_given(self, text: str) -> str:
        if text.startswith(self._given):
            return text[len(self._given) :]
        return text[len(self._given.rstrip(REPLACEMENT)) :]

    def _give_certain(self, text: str) -> str:
        """The text before the incomplete character; `text` includes the context's."""
        if not text.startswith(self._context_text):
            return ""
        certain = text[len(self._context_text) :].rstrip(REPLACEMENT)
        if len(certain) <= len(self._given) or not certain.startswith(self._given):
            return ""
        piece = certain[len(self._given) :]
        self._given = certain
        return piece

    def _cut(self, text: str) -> str:
        """Too much is pending: release the text up to a position where decoding both sides separately gives the same as
        decoding them together, so that later tokens can no longer change the text before it."""
        whole = self._context_text + text
        for kept in range(1, CHARACTER + 1):
            before = self._decode(self._context + self._pending[:-kept])
            if before + self._decode(self._pending[-kept:]) == whole:
                released = before[len(self._context_text) :]
                piece = self._beyond_given(released)
                self._pending = self._pending[-kept:]
                self._given = self._given[len(released) :]
                self._forget()
                return piece
        if len(self._pending) < 4 * MAX_PENDING:
            return self._give_certain(whole)
        return self._settle(text)


class WordDetokenizer:
    """A detokenizer for tokenizers that write a text anew from all of its words, as Moses does: whether a quotation
    mark opens or closes depends on how many come before it. So all ids are decoded again for each delta, and a word is
    returned when the next one has begun, since punctuation may join it until then.

    Args:
        decode: converts all ids to text and hides none.
        prompt: the tokens before the answer, without special tokens; may be empty.
    """

    __slots__ = ("_decode", "_given", "_ids")

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt)
        self._given = decode(self._ids) if prompt else ""

    def append(self, ids: Sequence[int]) -> str:
        """Add ids; returns the text that became certain (possibly empty)."""
        self._ids += ids
        text = self._decode(self._ids) if ids else ""
        certain = text[: max(text.rfind(" "), 0)]
        if not certain.startswith(self._given):
            return ""
        piece = certain[len(self._given) :]
        self._given = certain
        return piece

    def finish(self) -> str:
        """The text that is still pending, when no more ids will come."""
        piece = self._decode(self._ids)[len(self._given) :]
        self._given += piece
        return piece
