"""Drafts from known texts: the tokens that followed the longest earlier occurrence of a sequence's last tokens.

The texts are the sequence itself (prompt-lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding), the
client's prediction of the answer, and earlier answers (suffix decoding, arXiv:2411.04975). Drafts from them pay off
where an answer repeats something: edits of code, quotations, JSON, agents that read and write the same files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from engine.scheduling.plan import Int32
from engine.scheduling.sequence import IntBuffer

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
# Share of the equally long occurrences that must agree on a token, where they vote.
_MAJORITY = 0.5
END = -1
"""Follows each of several texts. No sequence has this token."""
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
        """Index the tokens added since the last call. `tokens`: [N] the whole sequence; that of the last call is a
        prefix of it."""
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
        """Index all tokens of the first call at once."""
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
        later of two equally good ones. (-1, 0) if the last n-gram is new. `tokens`: [N] the whole sequence, which is
        indexed."""
        return _best(self.occurrences(tokens, tokens))

    def occurrences(self, indexed: Int32, tokens: Int32) -> Iterator[tuple[int, int]]:
        """The last occurrences of a sequence's end, from the latest back: their ends, and the tokens that they share
        with it.

        Args:
            indexed: [N] the tokens of this index.
            tokens: all tokens of the sequence. It may be the indexed one: its end is no occurrence of itself.
        """
        size = len(tokens)
        if size < NGRAM:
            return
        end = self._before[size] if indexed is tokens else self._last.get(_key(tokens[-NGRAM:].tolist()), -1)
        tail = tokens[max(size - LONGEST, 0) :][::-1]
        for _ in range(MOST_CANDIDATES):
            if end < 0:
                return
            other = indexed[max(end - LONGEST, 0) : end][::-1]
            common = min(len(other), len(tail))
            different = np.flatnonzero(other[:common] != tail[:common])
            shared = int(different[0]) if len(different) else common
            yield end, shared
            if shared == LONGEST:
                return
            end = self._before[end]


def _best(occurrences: Iterator[tuple[int, int]]) -> tuple[int, int]:
    return max(occurrences, key=lambda found: found[1], default=(-1, 0))


class KnownTexts:
    """Texts beside a sequence that its answer may repeat. `END` follows each of them."""

    def __init__(self) -> None:
        self._tokens = IntBuffer()
        self._index = NgramIndex()

    def __len__(self) -> int:
        return self._tokens.size

    def add(self, text: Int32) -> None:
        self._tokens.extend([*text.tolist(), END])
        self._index.extend(self._tokens.view())

    def forget(self, size: int) -> None:
        """Forget all but about this many of the last tokens."""
        kept = self._tokens.view(max(self._tokens.size - size, 0)).copy()
        self._tokens, self._index = IntBuffer(kept), NgramIndex()
        self._index.extend(self._tokens.view())

    def occurrences(self, tokens: Int32) -> Iterator[tuple[Int32, int, int]]:
        """The texts with each occurrence of a sequence's end, as `NgramIndex.occurrences` has them."""
        indexed = self._tokens.view()
        for end, shared in self._index.occurrences(indexed, tokens):
            if indexed.item(end) != END:
                yield indexed, end, shared

    def after(self, end: int) -> Int32:
        """The tokens from a place on, to the end of all texts."""
        return self._tokens.view(end)


class Prediction:
    """The client's prediction of an answer, followed from its beginning, because the first tokens of an answer are no
    n-gram yet. After a token that differs from the answer's, the prediction continues with the token after it."""

    def __init__(self, tokens: Int32):
        self.texts = KnownTexts()
        self.texts.add(tokens)
        self._known = 0  # tokens of the answer that were followed
        self._at = 0
        self._right = 0  # of the last ones, that the prediction had

    def follow(self, answer: Int32) -> None:
        """Compare the tokens of the answer that came since the last call."""
        came = answer[self._known :]
        expected = self.texts.after(self._at)[: len(came)]
        for token, other in zip(came.tolist(), expected.tolist(), strict=False):
            self._right = self._right + 1 if token == other else 0
        self._at += len(expected)
        self._known = len(answer)

    def realign(self, at: int) -> None:
        """The answer is known to go on from this place."""
        self._at = at

    @property
    def next(self) -> tuple[int, int]:
        """The place of the next token, and the number of tokens before it that were right; at the beginning as many as
        a long match has."""
        return self._at, LONGEST if self._right == self._known else min(self._right, LONGEST)


@dataclass(slots=True)
class Drafting:
    """The texts that a sequence may repeat, and the share of its guesses that were right.

    Each guess is compared with the tokens that came, whether it was drafted or not. So the drafter notices that a text
    begins to repeat, without the cost of a draft.
    """

    # of the sequence's own tokens; None: they are not looked at
    index: NgramIndex | None = field(default_factory=NgramIndex)
    prediction: Prediction | None = None  # the client's, of the answer that begins at `answer_at`
    answer_at: int = 0
    earlier: KnownTexts | None = None
    votes: bool = False  # the equally long occurrences vote on each token; otherwise the latest one counts
    _right: list[float] = field(default_factory=lambda: [rate * count for rate, count in _PRIOR])
    _seen: list[float] = field(default_factory=lambda: [count for _, count in _PRIOR])
    _guess: list[int] = field(default_factory=list)
    _guess_at: int = 0
    _group: int = 0

    def guess(self, tokens: Int32, most: int) -> tuple[list[int], float]:
        """At most `most` tokens that may follow, each with the probability that it is right if all before it are.
        `tokens`: [N] the whole sequence."""
        self._learn(tokens)
        found = self._occurrences(tokens)
        length = max((shared for _, _, shared in found), default=-1)
        best = [(text, end) for text, end, shared in found if shared == length]
        guess = _continued(tokens, best if self.votes else best[:1], most)
        self._guess, self._guess_at = guess, len(tokens)
        if not guess:
            return [], 0.0
        self._group = sum(length >= bound for bound in _LENGTHS)
        return guess, self._right[self._group] / self._seen[self._group]

    def _occurrences(self, tokens: Int32) -> list[tuple[Int32, int, int]]:
        """The texts that may go on as the sequence does, with the place in each and the length of the match. Of equally
        long ones, the prediction comes first, then the sequence itself."""
        found: list[tuple[Int32, int, int]] = []
        if self.prediction is not None:
            self.prediction.follow(tokens[self.answer_at :])
            matches = list(self.prediction.texts.occurrences(tokens))
            at, right = self.prediction.next
            if all(shared <= right for _, _, shared in matches):
                if at < len(self.prediction.texts):
                    found.append((self.prediction.texts.after(0), at, right))
            else:
                best = max(matches, key=lambda match: match[2])
                self.prediction.realign(best[1])
                found.append(best)
        if self.index is not None:
            self.index.extend(tokens)
            found += [(tokens, end, shared) for end, shared in self.index.occurrences(tokens, tokens)]
        if self.earlier is not None:
            found += self.earlier.occurrences(tokens)
        return found

    def _learn(self, tokens: Int32) -> None:
        """Compare the last guess with the tokens that came."""
        came = tokens[self._guess_at : self._guess_at + len(self._guess)].tolist()
        if not came:
            return
        right = next((place for place, token in enumerate(came) if token != self._guess[place]), len(came))
        self._right[self._group] = _MEMORY * self._right[self._group] + right
        self._seen[self._group] = _MEMORY * self._seen[self._group] + min(right + 1, len(came))
        self._guess = []


def _continued(tokens: Int32, places: list[tuple[Int32, int]], most: int) -> list[int]:
    """The tokens that follow these places of texts, as long as most of the texts agree. A place in the sequence itself
    that reaches its end repeats what came since."""
    if len(places) == 1:
        ((text, end),) = places
        guess: list[int] = text[end : end + most].tolist()
        if text is not tokens:
            return guess[: guess.index(END)] if END in guess else guess
        while len(guess) < most:
            guess.append(guess[end - len(tokens)])
        return guess
    guess = []
    while places and len(guess) < most:
        following = [_token_at(text, end + len(guess), tokens, guess) for text, end in places]
        votes = Counter(token for token in following if token != END)
        if not votes:
            break
        token, count = votes.most_common(1)[0]  # of equal counts, the first
        if count <= _MAJORITY * votes.total() and len(votes) > 1:
            break
        places = [place for place, other in zip(places, following, strict=True) if other == token]
        guess.append(token)
    return guess


def _token_at(text: Int32, place: int, tokens: Int32, guess: list[int]) -> int:
    if place < len(text):
        return text.item(place)
    if text is tokens:
        return guess[place - len(tokens)]
    return END


def _key(ids: list[int]) -> int:
    first, second, third = ids
    return first << 2 * _BITS | second << _BITS | third
