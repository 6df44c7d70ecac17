"""From a token classifier's scores to the spans that it found in the text, as in transformers' pipeline."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from engine.interface.outputs import EngineInfo, Matrix, Pooled
from engine.interface.values import brief, fail
from engine.text.encoding import Encoding
from engine.text.tokenizer import Tokenizer

Aggregation = Literal["none", "simple", "first", "average", "max"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
# The class of tokens outside entities, in CoNLL's notation.
OUTSIDE = ("O",)


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text and its class.

    Attributes:
        label: the class; for joined tokens without "B-" and "I-".
        score: score of that class, the mean over joined tokens or words.
        start, end: characters [start, end) of the text; None if the tokenizer does not report positions (see
            `Encoding.offsets`).
        text: its text, or the text of its tokens.
    """

    label: str
    score: float
    start: int | None
    end: int | None
    text: str


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens [first, last] of the input with their scores, [classes]; `follows`: whether they continue a word."""

    scores: Matrix
    first: int
    last: int
    follows: bool = False

    @property
    def best(self) -> int:
        return int(self.scores.argmax())


def spans_of(
    pooled: Pooled,
    encoding: Encoding,
    text: str | None,
    tokenizer: Tokenizer | None,
    info: EngineInfo,
    aggregation: Aggregation = "simple",
    *,
    ignore_labels: Collection[str] = OUTSIDE,
) -> list[Span]:
    """The spans in the answer to a request with the task "token_classify".

    It follows transformers' TokenClassificationPipeline; `aggregation` is its aggregation_strategy. "none" returns each
    token separately, except special ones. "simple" joins adjacent tokens whose labels differ only in the prefix, up to
    the next "B-". "first", "average" and "max" first give all tokens of a word one class: that of the first token, of
    the mean scores, or of the token with the highest score. Words are those of WordPiece. With other tokenizers, spaces
    separate words. Raises InvalidRequestError if the aggregation is unknown.

    Args:
        encoding, text: the input; `text` is None for an input of ids.
        tokenizer: None if there is none; the spans then have no text.
        ignore_labels: classes that are left out.
    """
    check_aggregation(aggregation)
    scores, by_word = pooled.values(), aggregation in ("first", "average", "max")
    found = [
        _Piece(scores[at], at, at, by_word and _follows(encoding, text, tokenizer, at))
        for at, owner in enumerate(encoding.sequence)
        if owner == 0
    ]
    if by_word:
        found = [_agreed(word, aggregation) for word in _words(found)]
    labelled = [(info.labels[piece.best], float(piece.scores[piece.best]), piece) for piece in found]
    spans = labelled if aggregation == "none" else list(_joined(labelled))
    return [
        Span(label, score, *_place(encoding, piece), _read(encoding, text, tokenizer, piece))
        for label, score, piece in spans
        if label not in ignore_labels
    ]


def check_aggregation(aggregation: object) -> None:
    """Refuse an unknown way to join tokens. Raises InvalidRequestError if the way is unknown; the message names the
    known ways."""
    if aggregation not in AGGREGATIONS:
        fail("aggregation", f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {brief(aggregation)}.")


def _follows(encoding: Encoding, text: str | None, tokenizer: Tokenizer | None, at: int) -> bool:
    """Whether the token continues the word of the token before it."""
    token = encoding.ids[at]
    if tokenizer is None or encoding.offsets is None or text is None or token == tokenizer.unk_token_id:
        return False
    start, end = encoding.offsets[at]
    if tokenizer.subword_prefix:
        return len(tokenizer.written(token)) != len(text[start:end])
    return start > 0 and " " not in text[start - 1 : start + 1]


def _words(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    word: list[_Piece] = []
    for piece in pieces:
        if word and not piece.follows:
            yield word
            word = []
        word.append(piece)
    if word:
        yield word


def _agreed(word: list[_Piece], aggregation: Aggregation) -> _Piece:
    """A word as one piece, with scores of classes on which its tokens agree."""
    if aggregation == "first":
        scores = word[0].scores
    elif aggregation == "max":
        scores = max(word, key=lambda piece: float(piece.scores.max())).scores
    else:
        scores = np.stack([piece.scores for piece in word]).mean(0)
    return _Piece(scores, word[0].first, word[-1].last)


def _joined(labelled: list[tuple[str, float, _Piece]]) -> Iterator[tuple[str, float, _Piece]]:
    group: list[tuple[str, float, _Piece]] = []
    kind = ""
    for entry in labelled:
        begins, current = _tag(entry[0])
        if group and (begins or current != kind):
            yield _group(group)
            group = []
        group.append(entry)
        kind = current
    if group:
        yield _group(group)


def _group(group: list[tuple[str, float, _Piece]]) -> tuple[str, float, _Piece]:
    first, last = group[0][2], group[-1][2]
    score = float(np.mean([score for _, score, _ in group]))
    return group[0][0].split("-", 1)[-1], score, _Piece(first.scores, first.first, last.last)


def _tag(label: str) -> tuple[bool, str]:
    """Whether a label begins a span, and the label's class."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _place(encoding: Encoding, piece: _Piece) -> tuple[int | None, int | None]:
    if encoding.offsets is None:
        return None, None
    return encoding.offsets[piece.first][0], encoding.offsets[piece.last][1]


def _read(encoding: Encoding, text: str | None, tokenizer: Tokenizer | None, piece: _Piece) -> str:
    start, end = _place(encoding, piece)
    if text is not None and start is not None:
        return text[start:end]
    if tokenizer is None:
        return ""
    return tokenizer.decode(encoding.ids[piece.first : piece.last + 1], skip_special_tokens=False)
