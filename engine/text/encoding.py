"""An encoder's input from a text or a pair of texts: tokens, segments, and their positions in the text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from engine.errors import InvalidRequestError

Side = Literal["left", "right"]
Offset = tuple[int, int]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Encoding:
    """A text, or a pair of texts, in the form that a model reads; the lists have one entry per token."""

    ids: list[int]
    type_ids: list[int]  # the tokens' segments; all 0 if the tokenizer has none
    # the characters [start, end) of its text that a token stands for; (0, 0) for a token that the tokenizer added. None
    # if they are not known: for tokenizers written in Python, and for inputs that arrived as ids.
    offsets: list[Offset] | None
    # 0 for tokens of the first text, 1 for the second, None for tokens that the tokenizer added
    sequence: list[int | None]
    truncated: bool = False  # whether tokens were left out
    # the index of each token's word in its text, None for a token that belongs to no word; None in all if this was not
    # asked for, or is not known
    words: list[int | None] | None = None

    @classmethod
    def of_ids(
        cls,
        ids: Sequence[int],
        max_length: int | None = None,
        side: Side = "right",
        *,
        type_ids: Sequence[int] | None = None,
        added: Collection[int] = (),
    ) -> Encoding:
        """An input that arrived as ids: a single text with the special tokens it contains, cut at `side` to
        `max_length`.

        Args:
            type_ids: the segments; None means all 0.
            added: ids that count as added by a tokenizer.
        """
        length = len(ids) if max_length is None else max_length
        kept = cut(list(ids), length, side)
        segments = [0] * len(kept) if type_ids is None else cut(list(type_ids), length, side)
        return cls(kept, segments, None, [None if token in added else 0 for token in kept], len(kept) < len(ids))


def encode_fast(
    fast: Any,
    texts: tuple[str, ...],
    *,
    special: bool,
    segments: bool,
    max_length: int | None,
    side: Side,
    words: bool = False,
    marker: int | None = None,
) -> Encoding:
    """Encode one or two texts with a tokenizer of the tokenizers library, which must be set to neither truncate nor
    pad.

    The library would truncate before it adds special tokens, through a setting that all threads share. Removing the
    same tokens afterwards gives the same result. Raises InvalidRequestError if there are more special tokens than
    `max_length`.
    """
    # Not `encode`: that holds Python's lock, and so blocks the rest of the process.
    whole = fast.encode_batch([texts if len(texts) == 2 else texts[0]], add_special_tokens=special)[0]
    ids, sequence, offsets = whole.ids, whole.sequence_ids, whole.offsets
    type_ids = whole.type_ids if segments else [0] * len(ids)
    of_words = whole.word_ids if words else None
    if marker is not None:
        at = _place_of_marker(ids, special)
        ids, sequence, offsets = _with(ids, at, marker), _with(sequence, at, None), _with(offsets, at, (0, 0))
        type_ids, of_words = _with(type_ids, at, 0), None if of_words is None else _with(of_words, at, None)
    if max_length is None or len(ids) <= max_length:
        return Encoding(ids, type_ids, offsets, sequence, words=of_words)
    places = [[at for at, owner in enumerate(sequence) if owner == number] for number in range(len(texts))]
    added = [at for at, owner in enumerate(sequence) if owner is None]
    room = _room(max_length, len(added))
    lengths = _longest_first([len(part) for part in places], room, odd_to_first=False)
    parts = [cut(part, length, side) for part, length in zip(places, lengths, strict=True)]
    kept = sorted([*added, *(at for part in parts for at in part)])
    return Encoding(
        [ids[at] for at in kept],
        [type_ids[at] for at in kept],
        [offsets[at] for at in kept],
        [sequence[at] for at in kept],
        truncated=True,
        words=None if of_words is None else [of_words[at] for at in kept],
    )


def encode_words(fast: Any, words: list[str], *, segments: bool) -> Encoding:
    """Encode words that are already separated, with a tokenizer of the tokenizers library: each word separately, with
    the special tokens around all of them. The tokens' positions in a text are then not known."""
    whole = fast.encode_batch([words], is_pretokenized=True)[0]
    type_ids = whole.type_ids if segments else [0] * len(whole.ids)
    return Encoding(whole.ids, type_ids, None, whole.sequence_ids, words=whole.word_ids)


def encode_slow(
    hf: Any,
    texts: tuple[str, ...],
    *,
    special: bool,
    segments: bool,
    max_length: int | None,
    side: Side,
    words: bool = False,
    marker: int | None = None,
) -> Encoding:
    """Encode one or two texts with a `transformers` tokenizer written in Python, which has neither offsets nor words.
    Raises InvalidRequestError if there are more special tokens than `max_length`, or the tokenizer does not accept
    pairs."""
    parts = [list(hf.encode(text, add_special_tokens=False, verbose=False)) for text in texts]
    total = sum(map(len, parts))
    added = (len(_joined(hf, [[] for _ in texts])) if special else 0) + (marker is not None)
    truncated = max_length is not None and total + added > max_length
    if max_length is not None and truncated:
        lengths = _longest_first([len(part) for part in parts], _room(max_length, added), odd_to_first=True)
        parts = [cut(part, length, side) for part, length in zip(parts, lengths, strict=True)]
    if not special:
        ids = [token for part in parts for token in part]
        sequence: list[int | None] = [n for n, part in enumerate(parts) for _ in part]
        return _marked(Encoding(ids, [0] * len(ids), None, sequence, truncated), marker, special)
    ids = _joined(hf, parts)
    # To learn which tokens come from which text, send numbers that no token has through the same template.
    marks = _joined(hf, [[-1 - number] * len(part) for number, part in enumerate(parts)])
    sequence = [-1 - mark if mark < 0 else None for mark in marks]
    type_ids = list(hf.create_token_type_ids_from_sequences(*parts)) if segments else [0] * len(ids)
    return _marked(Encoding(ids, type_ids, None, sequence, truncated), marker, special)


def _marked(encoding: Encoding, marker: int | None, special: bool) -> Encoding:
    """The tokens of a Python tokenizer, with the marker inserted."""
    if marker is None:
        return encoding
    at = _place_of_marker(encoding.ids, special)
    return replace(
        encoding,
        ids=_with(encoding.ids, at, marker),
        type_ids=_with(encoding.type_ids, at, 0),
        sequence=_with(encoding.sequence, at, None),
    )


def _place_of_marker(ids: Sequence[int], special: bool) -> int:
    """The marker's position: after the first token, which usually stands for the whole input; at the start if no
    special tokens are added."""
    return 1 if special and ids else 0


def _with(items: Sequence[Item], at: int, item: Item) -> list[Item]:
    return [*items[:at], item, *items[at:]]


def _joined(hf: Any, parts: list[list[int]]) -> list[int]:
    """The tokens of one or two texts with the special tokens around them."""
    try:
        return list(hf.build_inputs_with_special_tokens(*parts))
    except (ValueError, NotImplementedError) as error:
        raise InvalidRequestError(
            f"the model's tokenizer cannot put {'two texts' if len(parts) == 2 else 'a text'} between its special "
            f"tokens: {error}",
            param="input",
        ) from error


def _room(max_length: int, added: int) -> int:
    """The number of tokens of the text that fit beside the special ones."""
    if max_length < added:
        raise InvalidRequestError(
            f"the input cannot be cut to {max_length} tokens, because the tokenizer adds {added} special tokens. "
            f"Set truncate_prompt_tokens to at least {added}.",
            param="truncate_prompt_tokens",
            code="invalid_value",
        )
    return max_length - added


def _longest_first(lengths: list[int], room: int, *, odd_to_first: bool) -> list[int]:
    """The lengths of one or two texts when tokens are removed from the longer one until both are equal, and then from
    both. If two equal texts cannot share the room equally, the tokenizers library gives the extra token to the text
    that was longer (the second if neither was). Python's tokenizers give it to the first text."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    if first + second <= room:
        return lengths
    if 2 * min(first, second) <= room:
        return [first, room - first] if first <= second else [room - second, second]
    half, more = room // 2, room - room // 2
    return [more, half] if odd_to_first or first > second else [half, more]


def cut(items: list[Item], length: int, side: Side) -> list[Item]:
    """The first tokens, or the last ones if the excess is removed from the left."""
    return items[max(len(items) - length, 0) :] if side == "left" else items[:length]
