"""Extractive question answering: from scores of beginnings and ends to spans of a context, as in transformers' pipeline
of version 4 (version 5 has none). A context that is too long is read in overlapping windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequestError
from engine.interface.outputs import EngineInfo, Matrix, Pooled
from engine.interface.values import NumberRange, check_number
from engine.text.encoding import Encoding, Side
from engine.text.tokenizer import Tokenizer

DEFAULT_ANSWERS, MAX_ANSWERS = 1, 1000
DEFAULT_ANSWER_LENGTH, MAX_ANSWER_LENGTH = 15, 512
DEFAULT_WINDOW, DEFAULT_OVERLAP = 384, 128
MAX_WINDOWS = 4096  # maximum windows of one request

_CONTEXT = 1  # the second text of the pair

Row = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answer:
    """A part of the context that answers the question."""

    answer: str  # its text; "" if the text has no answer
    # the product of the probabilities that an answer begins and ends there, within its window. Scores of equal texts
    # are added up.
    score: float
    # start, end: characters [start, end) of the context
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTerms:
    """The parameters of a question; the names are those of transformers' pipeline."""

    top_k: int = DEFAULT_ANSWERS  # maximum number of answers, best first
    max_answer_len: int = DEFAULT_ANSWER_LENGTH  # maximum tokens of an answer
    # tokens of a window, including question and special tokens; None: 384, or the model's limit if that is less
    max_seq_len: int | None = None
    # tokens of the context that a window shares with the next one; None: 128, or half a window if that is less
    doc_stride: int | None = None
    handle_impossible_answer: bool = False
    align_to_words: bool = True  # whether answers are extended to whole words

    def __post_init__(self) -> None:
        check_number("top_k", self.top_k, NumberRange(low=1, high=MAX_ANSWERS, integer=True, optional=False))
        lengths = NumberRange(low=1, high=MAX_ANSWER_LENGTH, integer=True, optional=False)
        check_number("max_answer_len", self.max_answer_len, lengths)
        check_number("max_seq_len", self.max_seq_len, NumberRange(low=1, integer=True))
        check_number("doc_stride", self.doc_stride, NumberRange(low=0, integer=True))

    def window(self, info: EngineInfo) -> tuple[int, int]:
        """Tokens of a window, and tokens that two windows share. Raises InvalidRequestError if the window exceeds the
        model's limit, or contains nothing new."""
        size = min(DEFAULT_WINDOW, info.max_model_len) if self.max_seq_len is None else self.max_seq_len
        if size > info.max_model_len:
            raise InvalidRequestError(
                f"max_seq_len is {size}, but this model takes at most {info.max_model_len} tokens (max_model_len). "
                f"Lower it, or raise --max-model-len.",
                param="max_seq_len",
                code="invalid_value",
            )
        overlap = min(size // 2, DEFAULT_OVERLAP) if self.doc_stride is None else self.doc_stride
        if overlap >= size:
            raise InvalidRequestError(
                f"doc_stride ({overlap}), the overlap of neighbouring windows, must be smaller than a window of "
                f"{size} tokens (max_seq_len).",
                param="doc_stride",
                code="invalid_value",
            )
        return size, overlap


def read_question(tokenizer: Tokenizer, question: str, context: str) -> Encoding:
    """A question and its context as one pair, of any length. Raises InvalidRequestError if one of them is empty or
    invalid, or the tokenizer does not report positions."""
    for name, text in (("question", question), ("context", context)):
        if not text:
            raise InvalidRequestError(f"the {name} is empty.", param=name, code="invalid_value")
    found = tokenizer.encode_input(question, context, words=True)
    if found.offsets is None:
        raise InvalidRequestError(
            "the model's tokenizer is a Python tokenizer and does not report positions of tokens, which this task "
            "needs. Add a tokenizer.json to its folder.",
            param="context",
            code="no_offsets",
        )
    if _CONTEXT not in found.sequence:
        raise InvalidRequestError("the context has no tokens.", param="context", code="invalid_value")
    return found


def windows_of(encoding: Encoding, size: int, overlap: int, side: Side) -> list[Encoding]:
    """A question with parts of its context. Each part has at most `size` tokens, and neighbouring parts share `overlap`
    tokens. Raises InvalidRequestError if the question leaves no room for a context, or there are too many windows.

    Args:
        encoding: see `read_question`.
        side: the side at which the tokenizer cuts: with "left", windows begin at the context's end.
    """
    places = [at for at, owner in enumerate(encoding.sequence) if owner == _CONTEXT]
    others = len(encoding.ids) - len(places)
    room = size - others
    if len(places) <= room:
        return [encoding]
    if room <= overlap:
        raise InvalidRequestError(
            f"the question is too long: with special tokens it takes {others} of a window's {size} tokens "
            f"(max_seq_len), and the rest must exceed the overlap of {overlap} tokens (doc_stride). Shorten the "
            f"question, raise max_seq_len, or lower doc_stride.",
            param="question",
            code="context_length_exceeded",
        )
    count = -(-(len(places) - room) // (room - overlap)) + 1
    if count > MAX_WINDOWS:
        raise InvalidRequestError(
            f"the context has {len(places)} tokens, which make {count} windows of {room} tokens with an overlap of "
            f"{overlap}; at most {MAX_WINDOWS} windows are allowed. Shorten it, raise max_seq_len, or lower "
            f"doc_stride.",
            param="context",
            code="context_length_exceeded",
        )
    first, last = places[0], places[-1] + 1
    return [
        _part(encoding, [*range(first), *range(first + begin, first + end), *range(last, len(encoding.ids))])
        for begin, end in _cuts(len(places), room, room - overlap, side)
    ]


def _cuts(count: int, room: int, step: int, side: Side) -> Iterator[tuple[int, int]]:
    """The beginning and the end of each window among `count` tokens."""
    for start in range(0, count, step):
        end = min(start + room, count)
        yield (start, end) if side == "right" else (count - end, count - start)
        if end == count:
            return


def _part(encoding: Encoding, kept: list[int]) -> Encoding:
    assert encoding.offsets is not None
    return replace(
        encoding,
        ids=[encoding.ids[at] for at in kept],
        type_ids=[encoding.type_ids[at] for at in kept],
        offsets=[encoding.offsets[at] for at in kept],
        sequence=[encoding.sequence[at] for at in kept],
        words=None if encoding.words is None else [encoding.words[at] for at in kept],
        truncated=True,
    )


def answers_of(
    pooled: Sequence[Pooled], windows: Sequence[Encoding], context: str, terms: AnswerTerms, cls_token_id: int | None
) -> list[Answer]:
    """The answers in the results of the task "answer" for each window, best first. `cls_token_id`: the token that means
    "no answer"; None for models without one."""
    found: dict[str, Answer] = {}
    null = np.inf
    for answer, window in zip(pooled, windows, strict=True):
        starts, ends = _probabilities(answer.values(), window, cls_token_id)
        null = min(null, starts[0] * ends[0])
        starts[0] = ends[0] = 0.0  # no answer begins there
        for score, first, last in _best(starts, ends, terms):
            start, end = _place(window, first, last, terms.align_to_words)
            text = context[start:end]
            known = found.get(text.lower())
            found[text.lower()] = (
                Answer(text, score, start, end) if known is None else replace(known, score=known.score + score)
            )
    answers = list(found.values())
    if terms.handle_impossible_answer:
        answers.append(Answer("", float(null), 0, 0))
    return sorted(answers, key=lambda answer: -answer.score)[: terms.top_k]


def _probabilities(values: Matrix, window: Encoding, cls_token_id: int | None) -> tuple[Row, Row]:
    """The probabilities that an answer begins and ends with each token: [tokens] each, 0 outside the context except for
    the token that means "no answer"."""
    counts = np.array([owner == _CONTEXT for owner in window.sequence])
    counts |= np.array([token == cls_token_id for token in window.ids])
    numbers = np.where(counts[:, None], values.astype(np.float64), -np.inf)
    shares = np.exp(numbers - numbers.max(0))
    starts, ends = (shares / shares.sum(0)).T.copy()
    return starts, ends


def _best(starts: Row, ends: Row, terms: AnswerTerms) -> Iterator[tuple[float, int, int]]:
    """The likeliest spans of a window: score, first and last token."""
    length = min(terms.max_answer_len, len(starts))
    padded = np.concatenate((ends, np.zeros(length - 1)))
    scores = starts[:, None] * np.lib.stride_tricks.sliding_window_view(padded, length)
    flat = scores.ravel()
    # Some spans become equal when they are extended to whole words.
    count = min(2 * terms.top_k + 10 if terms.align_to_words else terms.top_k, len(flat))
    some = np.argpartition(-flat, count - 1)[:count]
    for place in some[np.lexsort((some, -flat[some]))].tolist():
        if flat[place] > 0:
            first, more = divmod(place, length)
            yield float(flat[place]), first, first + more


def _place(window: Encoding, first: int, last: int, align_to_words: bool) -> tuple[int, int]:
    """Characters [start, end) of the context from one token to another, or of the words that contain them."""
    assert window.offsets is not None
    words = window.words
    if align_to_words and words is not None and words[first] is not None and words[last] is not None:
        first, last = _end_of_word(window, first, -1), _end_of_word(window, last, 1)
    return window.offsets[first][0], window.offsets[last][1]


def _end_of_word(window: Encoding, token: int, step: int) -> int:
    """The first (step -1) or last (1) token of a token's word."""
    words, owners = window.words, window.sequence
    assert words is not None
    while 0 <= token + step < len(words) and owners[token + step] == _CONTEXT and words[token + step] == words[token]:
        token += step
    return token
