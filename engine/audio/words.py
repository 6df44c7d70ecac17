"""The words of an answer and their times, from the times of its tokens (arXiv:2212.04356; the rules are those of
OpenAI's program and of `transformers`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from engine.interface.outputs import SECONDS_PER_TIMESTAMP, SpeechInfo

# Decodes tokens to text without special tokens, with U+FFFD for incomplete characters.
Decode = Callable[[Sequence[int]], str]

_UNSPACED = ("zh", "ja", "th", "lo", "my", "yue")  # languages without spaces between words
# As in the reference, several marks in a row match if they are adjacent in this string.
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_OPENING, _CLOSING = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
_UNKNOWN = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word with adjacent punctuation and, if present, the space before it. `start`, `end`: seconds from the beginning
    of the whole sound."""

    start: float
    end: float
    text: str
    tokens: list[int]


@dataclass(slots=True)
class _Part:
    """Some text, and the indices of its tokens."""

    text: str
    places: list[int]


def words_of(
    tokens: Sequence[int],
    positions: Sequence[float],
    speech: SpeechInfo,
    decode: Decode,
    language: str | None,
    start: float,
    end: float,
) -> list[Word]:
    """The words of a window, with their times.

    Args:
        tokens: the model's answer.
        positions: the encoder positions at which all tokens but the last one end (the task "align").
        language: its code; None for one with spaces between words.
        start, end: bounds of the window, in seconds of the whole sound.
    """
    ends = [min(start + position * SECONDS_PER_TIMESTAMP, end) for position in positions]
    ends = [*ends, ends[-1] if ends else start]
    starts = [start, *ends[:-1]]
    words: list[Word] = []
    for places in _sentences(tokens, speech.first_timestamp_id, decode):
        for text, own in split_words([tokens[place] for place in places], decode, language):
            chosen = [places[i] for i in own]
            written = [tokens[place] for place in chosen]
            words.append(Word(start=starts[chosen[0]], end=ends[chosen[-1]], text=text, tokens=written))
    return words


def _sentences(tokens: Sequence[int], first_timestamp: int, decode: Decode) -> Iterator[list[int]]:
    """The ranges of text between two different timestamps. No word continues across such a pair."""
    opened: int | None = None
    places: list[int] = []
    for place, token in enumerate(tokens):
        if token < first_timestamp:
            if decode([token]):
                places.append(place)
        elif opened is None:
            opened = token
        elif token != opened:
            yield places
            opened, places = None, []
    yield places


def split_words(tokens: Sequence[int], decode: Decode, language: str | None) -> list[tuple[str, list[int]]]:
    """Texts of words, which together are the whole text, and the indices of their tokens. As in the reference, an
    incomplete character at the end is left out. `language`: its code; None for one with spaces between words."""
    parts = _characters(tokens, decode)
    if language not in _UNSPACED:
        parts = _spaced(parts)
    return [(part.text, part.places) for part in _with_closing(_with_opening(parts))]


def _characters(tokens: Sequence[int], decode: Decode) -> list[_Part]:
    """Shortest groups of tokens that form whole characters."""
    whole, written = decode(tokens), 0
    parts, places = list[_Part](), list[int]()
    for place in range(len(tokens)):
        places.append(place)
        text = decode([tokens[i] for i in places])
        unknown = text.find(_UNKNOWN)
        # U+FFFD in the whole text too is not an incomplete character.
        if unknown < 0 or written + unknown >= len(whole) or whole[written + unknown] == _UNKNOWN:
            parts.append(_Part(text, places))
            places, written = [], written + len(text)
    return parts


def _spaced(parts: Sequence[_Part]) -> list[_Part]:
    """Words begin with spaces; punctuation marks are separate."""
    words: list[_Part] = []
    for part in parts:
        if not words or part.text.startswith(" ") or part.text.strip() in _PUNCTUATION:
            words.append(part)
        else:
            words[-1] = _Part(words[-1].text + part.text, words[-1].places + part.places)
    return words


def _with_opening(parts: Sequence[_Part]) -> list[_Part]:
    """Opening marks after a space belong to the next word."""
    words: list[_Part] = []
    for part in reversed(parts):
        if words and part.text.startswith(" ") and part.text.strip() in _OPENING:
            words[-1] = _Part(part.text + words[-1].text, part.places + words[-1].places)
        else:
            words.append(part)
    return words[::-1]


def _with_closing(parts: Sequence[_Part]) -> list[_Part]:
    """Closing marks belong to the previous word."""
    words: list[_Part] = []
    for part in parts:
        if words and not words[-1].text.endswith(" ") and part.text in _CLOSING:
            words[-1] = _Part(words[-1].text + part.text, words[-1].places + part.places)
        else:
            words.append(part)
    return words
