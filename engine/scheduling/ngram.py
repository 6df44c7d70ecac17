"""Drafts from a sequence's own tokens: those that followed the longest earlier occurrence of its last tokens.

This is prompt-lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding). It pays off where an answer
repeats its prompt or itself: edits of code, quotations, JSON, agents that read and write the same files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.scheduling.plan import Int32

# Bits of a token id in the key of an n-gram: three ids fit into an int64.
_BITS = 21
NGRAM = 3
"""Tokens of the n-grams in the index: shorter repetitions say little about what follows."""
MOST_CANDIDATES = 16
"""The number of occurrences that are compared, starting with the last one."""
LONGEST = 32
"""The number of tokens up to which an occurrence is compared. A longer match is as good as this one."""
# Bounds of match lengths between which the share of right drafts is learnt together.
_LENGTHS = (6, 12)
# The initial share of right tokens, and the number of observations that it counts as.
_PRIOR = ((0.4, 2.0), (0.7, 2.0), (0.9, 2.0))
# Weight of past observations after each new one.
_MEMORY = 0.9


class NgramIndex:
    """The positions of each n-gram in a growing sequence.

    An occurrence is named by its end: the position of the token that followed.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._before: list[int] = []  # the end of the previous occurrence by end, -1 for none
        self._size = 0

    def extend(self, tokens: Int32) -> None:
        """Index the tokens added since the last call.

        Args:
            tokens: [N] the whole sequence; that of the last call is a prefix of it.
        """
        if self._size == 0 and len(tokens) > NGRAM:
            self._index_all(tokens)
            return
        for end in range(max(self._size + 1, NGRAM), len(tokens) + 1):
            key = _key(tokens[end - NGRAM : end].tolist())
            self._before.extend([-1] * (end - len(self._before)))
            self._before.append(self._last.get(key, -1))
            self._last[key] = end
        self._size = len(tokens)

    def _index_all(self, tokens: Int32) -> None:
        """The same for many tokens at once."""
        ids = tokens.astype(np.int64)
        keys = ids[:-2] << 2 * _BITS | ids[1:-1] << _BITS | ids[2:]
        ends = np.arange(NGRAM, len(tokens) + 1)
        order = np.argsort(keys, kind="stable")
        again = keys[order[1:]] == keys[order[:-1]]
        before = np.full(len(tokens) + 1, -1)
        before[ends[order[1:][again]]] = ends[order[:-1][again]]
        self._before = before.tolist()
        self._last = dict(zip(keys.tolist(), ends.tolist(), strict=True))
        self._size = len(tokens)

    def longest(self, tokens: Int32) -> tuple[int, int]:
        """The end of the earlier occurrence that shares the most tokens with the sequence's end, and their number; the
        later of two equally good ones. (-1, 0) if the last n-gram is new.

        Args:
            tokens: [N] the whole sequence, which is indexed.
        """
        size = len(tokens)
        end = self._before[size] if size >= NGRAM else -1
        tail = tokens[max(size - LONGEST, 0) :][::-1]
        best, length = -1, 0
        for _ in range(MOST_CANDIDATES):
            if end < 0:
                break
            other = tokens[max(end - LONGEST, 0) : end][::-1]
            different = np.flatnonzero(other != tail[: len(other)])
            shared = int(different[0]) if len(different) else len(other)
            if shared > length:
                best, length = end, shared
                if length == LONGEST:
                    break
            end = self._before[end]
        return best, length


@dataclass(slots=True)
class Drafting:
    """The index of a sequence's tokens, and the share of its guesses that were right.

    Each guess is compared with the tokens that came, whether it was drafted or not. So the drafter notices that a text
    begins to repeat, without the cost of a draft.
    """

    index: NgramIndex = field(default_factory=NgramIndex)
    _right: list[float] = field(default_factory=lambda: [rate * count for rate, count in _PRIOR])
    _seen: list[float] = field(default_factory=lambda: [count for _, count in _PRIOR])
    _guess: list[int] = field(default_factory=list)
    _guess_at: int = 0
    _group: int = 0

    def guess(self, tokens: Int32, most: int) -> tuple[list[int], float]:
        """At most `most` tokens that may follow, each with the probability that it is right if all before it are.

        Args:
            tokens: [N] the whole sequence.
        """
        self._learn(tokens)
        self.index.extend(tokens)
        end, length = self.index.longest(tokens)
        if end < 0:
            self._guess = []
            return [], 0.0
        self._group = sum(length >= bound for bound in _LENGTHS)
        guess: list[int] = tokens[end : end + most].tolist()
        period = len(tokens) - end
        while len(guess) < most:  # the occurrence reaches the sequence's end: it repeats itself
            guess.append(guess[len(guess) - period])
        self._guess, self._guess_at = guess, len(tokens)
        return guess, self._right[self._group] / self._seen[self._group]

    def _learn(self, tokens: Int32) -> None:
        """Compare the last guess with the tokens that came."""
        came = tokens[self._guess_at : self._guess_at + len(self._guess)].tolist()
        if not came:
            return
        right = next((place for place, token in enumerate(came) if token != self._guess[place]), len(came))
        self._right[self._group] = _MEMORY * self._right[self._group] + right
        self._seen[self._group] = _MEMORY * self._seen[self._group] + min(right + 1, len(came))
        self._guess = []


def _key(ids: list[int]) -> int:
    first, second, third = ids
    return first << 2 * _BITS | second << _BITS | third
