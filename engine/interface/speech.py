"""The special tokens of speech models, and the rules of their timestamps (Whisper, arXiv:2212.04356)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol, get_args

import numpy as np

from engine.audio.languages import language_code, language_codes
from engine.errors import InvalidRequestError, ModelLoadError
from engine.interface.constraints import allow
from engine.interface.outputs import NO_ALIGNMENT, Alignment, SpeechInfo, SpeechTask
from engine.interface.request import Decoding
from engine.interface.sampling_table import MaskRow, mask_words
from engine.interface.values import brief

_FILTER_WIDTH = 7  # if the config has no median_filter_width
_ENGLISH_VOCABULARY = 51_864  # vocabulary of the published English-only models, whose tokenizers contain all languages
_NEEDED = ("no_timestamps_token_id", "prev_sot_token_id", "lang_to_id", "task_to_id")
_TASKS: tuple[SpeechTask, ...] = get_args(SpeechTask)


class Vocabulary(Protocol):
    """A tokenizer."""

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text; None if there is none."""


def read_speech(
    stored: Mapping[str, Any],
    vocab_size: int,
    config: Any = None,
    load_vocabulary: Callable[[], Vocabulary | None] = lambda: None,
    *,
    honour: bool = True,
) -> SpeechInfo | None:
    """The special tokens of a speech model, from `generation_config.json`, or from the tokenizer if that file lacks
    them, as older files of Whisper do. None for a model without timestamps, or if no tokenizer can tell. Raises
    ModelLoadError if a value in the file is invalid, or neither it nor Whisper's tokenizer contains a required token.

    Args:
        config: the model's `transformers` config, which has the number of heads.
        load_vocabulary: returns the model's tokenizer, if it has one; called only if something is missing.
        honour: False leaves out the default language and task.
    """
    vocabulary = None
    needed = _NEEDED[:2] if stored.get("is_multilingual") is False else _NEEDED
    if getattr(config, "model_type", None) == "whisper" and any(stored.get(name) is None for name in needed):
        vocabulary = load_vocabulary()

    def known(text: str) -> int | None:
        found = None if vocabulary is None else vocabulary.token_id(f"<|{text}|>")
        return None if found is None or found >= vocab_size else found

    def known_among(names: Iterable[str]) -> dict[str, int]:
        return {name: found for name in names if (found := known(name)) is not None}

    first = stored.get("no_timestamps_token_id")
    if first is None:
        first = known("notimestamps")
    if first is None and vocabulary is not None:
        raise ModelLoadError(
            "generation_config.json has no no_timestamps_token_id, and the tokenizer has no token <|notimestamps|>. "
            "Transcription needs them. Copy both files from the base model."
        )
    if first is None:
        return None

    def token(name: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value < vocab_size:
            raise ModelLoadError(
                f"generation_config.json sets {name} to {value!r}, which is not in the vocabulary (ids 0 to "
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
    forced = _forced(stored, config) if honour else []
    languages, tasks = tokens("lang_to_id"), tokens("task_to_id")
    if not languages:
        languages = known_among(language_codes())
        tasks = tasks or known_among(_TASKS)
    many = stored.get("is_multilingual")
    if many is None and not stored.get("lang_to_id"):  # a forced beginning says it, otherwise the size
        many = forced[0] in (None, *languages.values()) if forced else vocab_size != _ENGLISH_VOCABULARY
    if many is False:
        languages, tasks = {}, {}
    if not tasks and forced and languages:
        tasks = known_among(_TASKS)
    before = known("startofprev") if before is None else token("prev_sot_token_id", before)
    found = _read_alignment(stored.get("alignment_heads"), config)
    return SpeechInfo(
        no_timestamps_id=first,
        max_initial_timestamp=most,
        languages=languages,
        tasks=tasks,
        prompt_id=before,
        **(_defaults(stored, forced, languages, tasks) if honour and languages else {}),
        alignment=found if isinstance(found, Alignment) else None,
        no_alignment=found if isinstance(found, str) else "",
    )


def _forced(stored: Mapping[str, Any], config: Any) -> list[int | None]:
    """The tokens that `forced_decoder_ids` puts after the first token, from position 1 on; None at positions that the
    engine fills in."""
    pairs = stored.get("forced_decoder_ids")
    if pairs is None:
        pairs = getattr(config, "forced_decoder_ids", None)
    found: list[int | None] = []
    for place, pair in enumerate(pairs if isinstance(pairs, list | tuple) else (), 1):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or pair[0] != place:
            break
        found.append(pair[1])
    return found


def _defaults(
    stored: Mapping[str, Any], forced: list[int | None], languages: Mapping[str, int], tasks: Mapping[str, int]
) -> dict[str, Any]:
    """The default language and task. Raises ModelLoadError if the model does not support them."""
    language, task = stored.get("language"), stored.get("task")
    if language is None and task is None:
        named = next((code for code, token in languages.items() if token in forced), None)
        does = next((name for name in _TASKS if tasks.get(name, -1) in forced), "transcribe")
        return {"language": named, "task": does, "defaults_are_forced": True} if forced else {}
    code = language_code(language.strip("<|>")) if isinstance(language, str) else language
    for name, given, value, known in (("language", language, code, languages), ("task", task, task, tasks or _TASKS)):
        if value is not None and (not isinstance(value, str) or value not in known):
            raise ModelLoadError(
                f"generation_config.json sets {name} to {brief(given)}, but the model supports "
                f"{', '.join(sorted(known))}. Correct the file, or ignore it with --generation-config none."
            )
    return {"language": code, "task": task or "transcribe"}


def _read_alignment(pairs: Any, config: Any) -> Alignment | str:
    """The heads in `alignment_heads`, or the reason why they cannot be used. A model with a wrong list, such as a
    distilled one with its teacher's, supports everything except word times."""
    name = "its generation_config.json names alignment_heads"
    layers, heads = getattr(config, "decoder_layers", 0), getattr(config, "decoder_attention_heads", 0)
    if pairs is None or pairs == []:
        return NO_ALIGNMENT
    if not isinstance(pairs, list):
        return f"{name} that are not a list of pairs [layer, head]: {brief(pairs)}"
    for pair in pairs:
        whole = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not (whole and 0 <= pair[0] < layers and 0 <= pair[1] < heads):
            return f"{name} that are not pairs [layer, head] of {layers} layers and {heads} heads: {brief(pair)}"
    if len({tuple(pair) for pair in pairs}) < len(pairs):
        return f"{name} twice: {brief(pairs)}"
    width = getattr(config, "median_filter_width", None) or _FILTER_WIDTH
    if type(width) is not int or width < 1 or width % 2 == 0:
        return f"its config.json sets median_filter_width to {brief(width)}, which is not an odd number above 0"
    return Alignment(heads=tuple((layer, head) for layer, head in pairs), filter_width=width)


class TimestampRules:
    """A constraint: timestamps begin an answer, come in pairs except at its end, and never go back.

    Also, if the allowed timestamps are together likelier than each other single token, one of them comes:
    `outweighed_from` of `engine.interface.constraints.Weighing`.

    Args:
        info: the model's special tokens.
        end_id: the token that ends answers; ids above it are not text.
        suppressed: tokens that never come; `suppressed_first`: tokens that do not come first.
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
        self._last_two = (True, True)  # whether the last two tokens were timestamps, the earlier one first
        self._latest: int | None = None

    def accept(self, token: int) -> None:
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
        """A copy of the state that develops independently."""
        copy = object.__new__(TimestampRules)
        copy.__dict__.update(self.__dict__)
        return copy


def timed(decoding: Decoding, info: SpeechInfo | None, vocab_size: int) -> Decoding:
    """Decoding parameters for answers with timestamps. As in `transformers`, tokens are suppressed before timestamps
    and other tokens are weighed against each other. Raises InvalidRequestError if the model has no timestamps, or no
    token that ends answers."""
    if info is None or not decoding.eos_ids:
        missing = "no_timestamps_token_id" if info is None else "eos_token_id"
        raise InvalidRequestError(
            f"timestamps need a speech model, but this model's generation_config.json has no {missing}.",
            param="timestamps",
            code="unsupported_parameter",
        )
    rules = TimestampRules(
        info, min(decoding.eos_ids), vocab_size, decoding.suppress_tokens, decoding.begin_suppress_tokens
    )
    return replace(decoding, constraint=rules, suppress_tokens=(), begin_suppress_tokens=())


@lru_cache(maxsize=4096)
def _span(first: int, last: int, vocab_size: int) -> MaskRow:
    """The bits of the tokens from `first` up to (not including) `last`."""
    bits = np.zeros(mask_words(vocab_size) * 32, dtype=np.uint8)
    bits[first : max(min(last, vocab_size), first)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@lru_cache(maxsize=64)
def _listed(ids: tuple[int, ...], vocab_size: int) -> MaskRow:
    row = np.zeros(mask_words(vocab_size), dtype=np.uint32)
    allow(row, [i for i in ids if i < vocab_size])
    return row
