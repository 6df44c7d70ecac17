"""What a speech model says of its tokens, and the rules of its timestamps (Whisper, arXiv:2212.04356)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from engine.errors import InvalidRequestError, ModelLoadError
from engine.interface.constraints import allow
from engine.interface.outputs import NO_ALIGNMENT, Alignment, SpeechInfo
from engine.interface.request import Decoding
from engine.interface.sampling_table import MaskRow, mask_words
from engine.interface.values import brief

_FILTER_WIDTH = 7  # where the config names no median_filter_width


def read_speech(stored: Mapping[str, Any], vocab_size: int, config: Any = None) -> SpeechInfo | None:
    """What a `generation_config.json` says of a speech model's tokens; None where it names no timestamps.

    Args:
        config: the model's, of `transformers`, which says how many heads there are.

    Raises:
        ModelLoadError: a value in it is impossible.
    """
    first = stored.get("no_timestamps_token_id")
    if first is None:
        return None

    def token(name: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise ModelLoadError(
                f"generation_config.json sets {name} to {value!r}, which is no id of the vocabulary (0 to "
                f"{vocab_size - 1}). Correct the file."
            )
        return value

    def tokens(name: str) -> dict[str, int]:
        found = stored.get(name) or {}
        if not isinstance(found, Mapping):
            raise ModelLoadError(f"generation_config.json: {name} must map names to token ids, found {found!r}.")
        return {str(key).strip("<|>"): token(f"{name}.{key}", value) for key, value in found.items()}

    if not 1 <= token("no_timestamps_token_id", first) < vocab_size - 1:
        raise ModelLoadError(f"generation_config.json: there are no timestamps after no_timestamps_token_id ({first}).")
    most, before = stored.get("max_initial_timestamp_index"), stored.get("prev_sot_token_id")
    if most is not None and (type(most) is not int or most < 0):
        raise ModelLoadError(f"generation_config.json: max_initial_timestamp_index must be 0 or more, found {most!r}.")
    many = stored.get("is_multilingual", True) is not False
    found = _read_alignment(stored.get("alignment_heads"), config)
    return SpeechInfo(
        no_timestamps_id=first,
        max_initial_timestamp=most,
        languages=tokens("lang_to_id") if many else {},
        tasks=tokens("task_to_id") if many else {},
        prompt_id=None if before is None else token("prev_sot_token_id", before),
        alignment=found if isinstance(found, Alignment) else None,
        no_alignment=found if isinstance(found, str) else "",
    )


def _read_alignment(pairs: Any, config: Any) -> Alignment | str:
    """The heads that `alignment_heads` lists, or why they are of no use. A model whose list is wrong, a distilled one
    with its teacher's for example, serves all but the times of words."""
    name = "its generation_config.json names alignment_heads"
    layers, heads = getattr(config, "decoder_layers", 0), getattr(config, "decoder_attention_heads", 0)
    if pairs is None or pairs == []:
        return NO_ALIGNMENT
    if not isinstance(pairs, list):
        return f"{name} that are no list of pairs [layer, head], but {brief(pairs)}"
    for pair in pairs:
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not (whole and 0 <= pair[0] < layers and 0 <= pair[1] < heads):
            return f"{name} that are no pairs [layer, head] of {layers} layers and {heads} heads: {brief(pair)}"
    if len({tuple(pair) for pair in pairs}) < len(pairs):
        return f"{name} twice: {brief(pairs)}"
    width = getattr(config, "median_filter_width", None) or _FILTER_WIDTH
    if type(width) is not int or width < 1 or width % 2 == 0:
        return f"its config.json sets median_filter_width to {brief(width)}, which is no odd number above 0"
    return Alignment(heads=tuple((layer, head) for layer, head in pairs), filter_width=width)


class TimestampRules:
    """A constraint: timestamps begin an answer, come in pairs but before its end, and never go back.

    Besides, where the timestamps that may come are together likelier than each other token alone, one of them comes:
    `outweighed_from` of `engine.interface.constraints.Weighing`.

    Args:
        info: the model's tokens.
        end_id: the token that ends answers: what is above it is no text.
        suppressed: tokens that never come; `suppressed_first`: those that do not come first.
    """

    is_complete = False

    def __init__(
        self,
        info: SpeechInfo,
        end_id: int,
        vocab_size: int,
        suppressed: Iterable[int] = (),
        suppressed_first: Iterable[int] = (),
    ):
        self.vocab_size = vocab_size
        self.outweighed_from = info.first_timestamp_id
        most = info.max_initial_timestamp
        self._end_id = end_id
        self._last_first = vocab_size if most is None else info.first_timestamp_id + most + 1
        self._suppressed = tuple(sorted({info.no_timestamps_id, *suppressed}))
        self._suppressed_first = tuple(sorted(set(suppressed_first)))
        self._count = 0
        self._last_two = (True, True)  # whether they were timestamps, the earlier one first
        self._latest: int | None = None

    def accept(self, token: int) -> None:
        """Remember a token that came."""
        is_timestamp = token >= self.outweighed_from
        self._count += 1
        self._last_two = (self._last_two[1], is_timestamp)
        if is_timestamp:
            self._latest = token

    def fill(self, mask_row: MaskRow) -> None:
        """Write which tokens may come next."""
        text, times = (0, self.outweighed_from), (self.outweighed_from, self.vocab_size)
        before, last = self._last_two
        if self._count == 0:
            text, times = (0, 0), (self.outweighed_from, self._last_first)
        elif last and before:
            times = (0, 0)
        elif last:
            text = (self._end_id, self.outweighed_from)
        if self._latest is not None:
            alone = last and not before  # the second of a pair may be the same
            times = (max(times[0], self._latest + (0 if alone else 1)), times[1])
        np.bitwise_or(_span(*text, self.vocab_size), _span(*times, self.vocab_size), out=mask_row)
        forbidden = (*self._suppressed, *(self._suppressed_first if self._count == 0 else ()))
        mask_row &= ~_listed(forbidden, self.vocab_size)

    def fork(self) -> TimestampRules:
        """The same state, which goes its own way."""
        copy = object.__new__(TimestampRules)
        copy.__dict__.update(self.__dict__)
        return copy


def timed(decoding: Decoding, info: SpeechInfo | None, vocab_size: int) -> Decoding:
    """The decoding whose answers hold timestamps. What is suppressed is, as in `transformers`, before timestamps and
    other tokens are weighed against each other.

    Raises:
        InvalidRequestError: the model knows no timestamps, or no token that ends answers.
    """
    if info is None or not decoding.eos_ids:
        missing = "no_timestamps_token_id" if info is None else "eos_token_id"
        raise InvalidRequestError(
            f"timestamps are for speech models, and the generation_config.json of this one names no {missing}.",
            param="timestamps",
            code="unsupported_parameter",
        )
    rules = TimestampRules(
        info, min(decoding.eos_ids), vocab_size, decoding.suppress_tokens, decoding.begin_suppress_tokens
    )
    return replace(decoding, constraint=rules, suppress_tokens=(), begin_suppress_tokens=())


@lru_cache(maxsize=4096)
def _span(first: int, last: int, vocab_size: int) -> MaskRow:
    """The bits of the tokens from `first` up to, without, `last`."""
    bits = np.zeros(mask_words(vocab_size) * 32, dtype=np.uint8)
    bits[first : max(min(last, vocab_size), first)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@lru_cache(maxsize=64)
def _listed(ids: tuple[int, ...], vocab_size: int) -> MaskRow:
    row = np.zeros(mask_words(vocab_size), dtype=np.uint32)
    allow(row, [i for i in ids if i < vocab_size])
    return row
