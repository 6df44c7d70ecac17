"""Entities of a text from scores of spans, for labels in the request (GLiNER, arXiv:2311.08526). A text that is too
long is read in overlapping windows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequestError
from engine.interface.outputs import EngineInfo, EntitiesInfo, Pooled
from engine.interface.pooling import DEFAULT_THRESHOLD, MAX_LABELS, PoolingParams
from engine.interface.values import NumberRange, brief, check_number, fail
from engine.pooled.answers import MAX_WINDOWS
from engine.text.encoding import Encoding
from engine.text.tokenizer import Tokenizer

DEFAULT_OVERLAP = 64  # words

_WORDS = re.compile(r"\w+(?:[-_]\w+)*|\S")  # maximum labels, as in GLiNER's training


@dataclass(frozen=True, slots=True)
class Entity:
    """A part of a text, with its label."""

    text: str
    label: str  # one of the requested labels
    # start, end: characters [start, end) of the text
    start: int
    end: int
    score: float  # from 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EntityTerms:
    """The parameters of a request for entities; the names are those of GLiNER's library, which has no `stride`."""

    labels: tuple[str, ...]  # the kinds of entities, in words; repeated ones count once
    threshold: float = DEFAULT_THRESHOLD  # an entity's score is above this
    flat_ner: bool = True  # whether entities do not overlap. False: one may lie within another.
    multi_label: bool = False  # whether an entity may have several labels, as one entry each
    # words that a window of a long text shares with the next one; None: 64, or half a window if that is less
    stride: int | None = None

    def __post_init__(self) -> None:
        for label in self.labels:
            if not isinstance(label, str) or not label.strip():
                fail("labels", f"labels must be texts that are not blank, got {brief(label)}.")
        object.__setattr__(self, "labels", tuple(dict.fromkeys(self.labels)))
        if not 1 <= len(self.labels) <= MAX_LABELS:
            fail("labels", f"labels must hold 1 to {MAX_LABELS} different texts, got {len(self.labels)}.")
        check_number("threshold", self.threshold, NumberRange(low=0, high=1, optional=False))
        check_number("stride", self.stride, NumberRange(low=0, integer=True))
        for name in ("flat_ner", "multi_label"):
            if not isinstance(getattr(self, name), bool):
                fail(name, f"{name} must be true or false, got {brief(getattr(self, name))}.")


@dataclass(frozen=True, slots=True)
class EntityWindow:
    """A part of a text, read with the labels. `first`: index of its first word in the text."""

    encoding: Encoding
    labels: list[int]
    words: list[int]
    first: int

    def params(self, threshold: float) -> PoolingParams:
        """The parameters for the engine."""
        return PoolingParams(task="entities", positions=self.labels, words=self.words, threshold=threshold)


@dataclass(frozen=True, slots=True)
class EntityReading:
    """A text as the model reads it."""

    text: str
    places: list[tuple[int, int]]  # the characters [start, end) of each word
    windows: list[EntityWindow]  # the windows in order; none for a text without words


def read_entities(tokenizer: Tokenizer, text: str, terms: EntityTerms, info: EngineInfo) -> EntityReading:
    """A text with the labels before it, in as many windows as necessary.

    Words without tokens do not count. Raises InvalidRequestError if the text is not valid Unicode, the labels leave no
    room for it, there are too many windows, or the tokenizer is not the one that the model was saved with.
    """
    reading = info.entities
    assert reading is not None  # the task was checked
    _check_labels(terms, reading)
    found = list(_WORDS.finditer(text))
    prompt = [part for label in terms.labels for part in (reading.label_mark, label)] + [reading.text_mark]
    whole = tokenizer.encode_words([*prompt, *(word.group() for word in found)])
    assert whole.words is not None
    firsts = _first_tokens(whole.words)
    labels = _marks(whole, firsts, len(terms.labels), reading)
    kept = [number for number in range(len(found)) if len(prompt) + number in firsts]
    if not kept:
        return EntityReading(text, [], [])
    begins = [firsts[len(prompt) + number] for number in kept]
    end = max(at for at, word in enumerate(whole.words) if word is not None) + 1
    room = info.max_model_len - begins[0] - (len(whole.ids) - end)
    cuts = list(_cuts([*begins, end], room, terms, reading, info.max_model_len))
    windows = [_window(whole, labels, [*begins, end], first, last) for first, last in cuts]
    return EntityReading(text, [found[number].span() for number in kept], windows)


def _check_labels(terms: EntityTerms, reading: EntitiesInfo) -> None:
    for label in terms.labels:
        for mark in (reading.label_mark, reading.text_mark):
            if mark in label:
                fail("labels", f"labels must not hold {mark}, which is reserved for the model; got {brief(label)}.")


def _first_tokens(words: Sequence[int | None]) -> dict[int, int]:
    """The position of the first token of each word."""
    found: dict[int, int] = {}
    for at, word in enumerate(words):
        if word is not None:
            found.setdefault(word, at)
    return found


def _marks(whole: Encoding, firsts: dict[int, int], count: int, reading: EntitiesInfo) -> list[int]:
    marks = [firsts.get(2 * number, -1) for number in range(count)]
    if any(at < 0 or whole.ids[at] != reading.label_token_id for at in marks) or 2 * count not in firsts:
        raise InvalidRequestError(
            f"the model's tokenizer does not read {reading.label_mark} as the token {reading.label_token_id} "
            "(class_token_index of gliner_config.json): the tokenizer files do not belong to this model.",
            param="labels",
            code="no_label_token",
        )
    for number in range(count):
        if 2 * number + 1 not in firsts:
            fail("labels", f"label {number} has no tokens. Use other words.")
    return marks


def _cuts(
    begins: Sequence[int], room: int, terms: EntityTerms, reading: EntitiesInfo, limit: int
) -> Iterator[tuple[int, int]]:
    """The first word of each window and the word after its last, for words that begin with these tokens. `begins`: the
    first token of each word; the last entry is the end of the last word."""
    count, first, number = len(begins) - 1, 0, 0
    while True:
        last = first
        while last < min(count, first + reading.max_words) and begins[last + 1] - begins[first] <= room:
            last += 1
        if last == count:
            yield first, last
            return
        number += 1
        wanted = DEFAULT_OVERLAP if terms.stride is None else terms.stride
        shared = min(wanted, (last - first) // 2) if terms.stride is None else wanted
        if last - first <= shared:
            raise InvalidRequestError(
                f"the labels and special tokens leave {max(room, 0)} of {limit} tokens (max_model_len) for the text. "
                f"They hold {last - first} words from word {first} on, but windows must overlap by {shared} "
                f"words (stride). Use fewer or shorter labels, lower stride, or raise --max-model-len.",
                param="labels",
                code="context_length_exceeded",
            )
        if number >= MAX_WINDOWS:
            raise InvalidRequestError(
                f"the text has {count} words, which make more than {MAX_WINDOWS} windows of at most "
                f"{reading.max_words} words with an overlap of {shared}. Send it in parts, or lower stride.",
                param="input",
                code="context_length_exceeded",
            )
        yield first, last
        first = last - shared


def _window(whole: Encoding, labels: list[int], begins: Sequence[int], first: int, last: int) -> EntityWindow:
    prompt, end = begins[0], begins[-1]
    skipped = begins[first] - prompt
    kept = [*range(prompt), *range(begins[first], begins[last]), *range(end, len(whole.ids))]
    ids, types = [whole.ids[at] for at in kept], [whole.type_ids[at] for at in kept]
    part = Encoding(ids, types, None, [whole.sequence[at] for at in kept], len(kept) < len(whole.ids))
    return EntityWindow(part, labels, [at - skipped for at in begins[first:last]], first)


def entities_of(
    pooled: Sequence[Pooled], reading: EntityReading, terms: EntityTerms, info: EntitiesInfo
) -> list[Entity]:
    """The entities in the results of the task "entities" for each window, in the order of their beginnings.

    The likeliest spans are taken first, and spans that overlap them are left out. A span in several windows has the
    highest of its scores.
    """
    parts = [_candidates(answer, window, terms, info) for answer, window in zip(pooled, reading.windows, strict=True)]
    if not parts:
        return []
    width, count = info.max_width, len(terms.labels)
    ids, scores = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    order = np.lexsort((ids, -scores))
    ids, scores = ids[order], scores[order]
    # Whether a span is taken does not depend on its label, so its highest score decides for all its labels.
    best = _first_of_each(ids // count)
    taken = _Taken(len(reading.places), width)
    spans = (ids[best] // count).tolist()
    kept = best[np.array([taken.add(*divmod(span, width), flat=terms.flat_ner) for span in spans], dtype=bool)]
    if terms.multi_label:
        each = _first_of_each(ids)
        kept = each[np.isin(ids[each] // count, ids[kept] // count)]
    kept = kept[np.argsort(ids[kept] // (count * width), kind="stable")]
    found = []
    for id, score in zip(ids[kept].tolist(), scores[kept].tolist(), strict=True):
        span, label = divmod(id, count)
        first, more = divmod(span, width)
        start, end = reading.places[first][0], reading.places[first + more][1]
        found.append(Entity(reading.text[start:end], terms.labels[label], start, end, score))
    return found


def _first_of_each(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The index of the first occurrence of each value, ascending."""
    return np.sort(np.unique(values, return_index=True)[1])


def _candidates(
    answer: Pooled, window: EntityWindow, terms: EntityTerms, info: EntitiesInfo
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Pairs of a span and a label, numbered as if the text had been read at once, and their scores."""
    shift = window.first * info.max_width * len(terms.labels)
    return answer.token_ids()[0].astype(np.int64) + shift, answer.values()[0]


class _Taken:
    """The spans of a text's words that have been taken as entities."""

    def __init__(self, words: int, width: int) -> None:
        self._width = width
        self._spans = np.zeros((words, width), dtype=bool)  # by first word and number of further words

    def add(self, first: int, more: int, *, flat: bool) -> bool:
        """Take a span unless it overlaps a taken one: at all, or, if not `flat`, without one lying within the other."""
        last = first + more
        lowest = max(first - self._width + 1, 0)
        starts, lengths = np.nonzero(self._spans[lowest : last + 1])
        starts += lowest
        ends = starts + lengths
        overlap = ends >= first
        if not flat:
            within = ((starts <= first) & (ends >= last)) | ((starts >= first) & (ends <= last))
            overlap &= ~within
        if overlap.any():
            return False
        self._spans[first, more] = True
        return True
