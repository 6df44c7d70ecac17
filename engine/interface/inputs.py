"""Checks a request's input and terms when it enters the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.errors import InvalidRequestError
from engine.interface.generation import check_ids
from engine.interface.outputs import EngineInfo, RepeatedInput, SignalKind
from engine.interface.request import AudioInput, EngineInput, PixelInput, SamplingParams, Seq2SeqInput, TokenInput
from engine.interface.token_sides import SIDES, Sides, read_sides
from engine.interface.vision import SeenImage, read_images

# Maximum bytes of a signal: an image of 2304 x 2304 pixels in three channels, or an hour of sound.
MOST_SIGNAL_BYTES = 64 * 2**20

_KINDS: dict[SignalKind, str] = {"image": "images", "audio": "sound"}


@dataclass(frozen=True, slots=True)
class ReadInput:
    """A request's input after all checks."""

    token_ids: tuple[int, ...]  # the first tokens of the decoder, or the input of a lone encoder
    encoder_token_ids: tuple[int, ...] = ()  # the encoder's input in an encoder-decoder model; () for other models
    sides: Sides = field(default_factory=dict)  # further values of each token, besides its id
    # float32 values that an encoder reads instead of tokens. The tokens are then zeros, one for each position.
    signal: NDArray[np.float32] | None = None
    images: tuple[SeenImage, ...] = ()  # those among the tokens


def read_input(input: EngineInput, info: EngineInfo, *, start: int | None) -> ReadInput:
    """The checked input of a request that generates. `start`: the first token of this encoder-decoder model's decoder;
    None if the model sets none. Raises InvalidRequestError if the input is of a kind that the model does not take,
    empty, too long, or outside the vocabulary."""
    if info.max_encoder_len is None:
        if isinstance(input, Seq2SeqInput | PixelInput | AudioInput):
            raise _wrong_kind(input, info, "prompt")
        if not isinstance(input, TokenInput):
            return ReadInput(_checked("prompt", input, info.vocab_size))
        tokens = _checked("prompt", input.token_ids, info.vocab_size)
        images = read_images(input.images, tokens, info.vision)
        return ReadInput(tokens, sides=read_sides(input.given, len(tokens), info.sides), images=images)
    if isinstance(input, PixelInput | AudioInput):
        signal, positions = _read_signal(input, info, "prompt")
        encoder_input = (*(0,) * positions, *_text_after(input, positions, info))
        return ReadInput(_decoder_begin(input.decoder_token_ids or (), info, start), encoder_input, signal=signal)
    if info.signal is not None:
        raise _wrong_kind(input, info, "prompt")
    begin: Sequence[int] = ()
    ids: Any = input
    if isinstance(input, Seq2SeqInput):
        ids, begin = input.encoder_token_ids, input.decoder_token_ids or ()
    elif isinstance(input, TokenInput):
        ids = input.token_ids
        read_sides(input.given, len(ids), {})  # defaults alone
        read_images(input.images, (), None)
    encoder_input = _checked("prompt", ids, info.encoder_vocab_size or info.vocab_size)
    _check_encoder_room(len(encoder_input), info)
    return ReadInput(_decoder_begin(begin, info, start), encoder_input)


def read_pooling_input(input: EngineInput, info: EngineInfo) -> ReadInput:
    """The checked input of a pooling request. Raises InvalidRequestError if the input is of a kind that the model does
    not take, empty, too long, or outside the vocabulary."""
    if isinstance(input, PixelInput | AudioInput):
        signal, positions = _read_signal(input, info, "input")
        return ReadInput((0,) * positions, signal=signal)
    if isinstance(input, Seq2SeqInput) or not info.vocab_size:
        raise _wrong_kind(input, info, "input")
    ids: Any = input.token_ids if isinstance(input, TokenInput) else input
    tokens = _checked("input", ids, info.vocab_size)
    if len(tokens) > info.max_model_len:
        raise InvalidRequestError(
            f"the input is too long: it has {len(tokens)} tokens, and this model takes at most {info.max_model_len} "
            "(max_model_len). Shorten it, send truncate_prompt_tokens, or raise --max-model-len.",
            param="input",
            code="context_length_exceeded",
        )
    given = input if isinstance(input, TokenInput) else TokenInput(tokens)
    images = read_images(given.images, tokens, info.vision)
    sides = read_sides(given.given, len(tokens), info.sides)
    if "token_types" not in given.given and info.second_after is not None:
        sides["token_types"] = SIDES["token_types"].array(_split_after(tokens, info.second_after))
    return ReadInput(tokens, sides=sides, images=images)


def read_aligned_input(input: EngineInput, info: EngineInfo) -> ReadInput:
    """A checked input for alignment: sound, and all tokens to locate in it. Raises InvalidRequestError if the input is
    of a kind that the model does not take, has no tokens, or is outside the vocabulary."""
    if isinstance(input, AudioInput) and not input.decoder_token_ids:
        raise InvalidRequestError(
            "the task align needs decoder_token_ids: the decoder's first tokens and its output.", param="decoder_prompt"
        )
    return read_input(input, info, start=None)


def as_signal(values: Any) -> NDArray[np.float32]:
    """An array of numbers as float32 in C order. Raises InvalidRequestError if it is not such an array, or is larger
    than `MOST_SIGNAL_BYTES`."""
    try:
        found = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"a signal must be an array of numbers: {error}.", param="input") from error
    if found.dtype.kind not in "fiu":
        raise InvalidRequestError(
            f"a signal must be an array of numbers, got a {type(values).__name__} of {found.dtype}.", param="input"
        )
    if 4 * found.size > MOST_SIGNAL_BYTES:
        raise InvalidRequestError(
            f"a signal may have at most {MOST_SIGNAL_BYTES} bytes as float32, got {4 * found.size}.", param="input"
        )
    return np.ascontiguousarray(found, dtype=np.float32)


def _read_signal(
    input: PixelInput | AudioInput, info: EngineInfo, param: Literal["input", "prompt"]
) -> tuple[NDArray[np.float32], int]:
    kind: SignalKind = "image" if isinstance(input, PixelInput) else "audio"
    wanted = info.signal
    if wanted is None or wanted.kind != kind:
        raise _wrong_kind(input, info, param)
    signal = as_signal(input.signal)
    if not signal.flags.writeable:  # bytes of a message, about which torch would warn
        signal = signal.copy()
    if signal.shape != wanted.shape:
        raise InvalidRequestError(
            f"this model reads {_KINDS[kind]} as numbers of shape {list(wanted.shape)}, got {list(signal.shape)}: "
            "its preprocessor makes them.",
            param=param,
            code="invalid_value",
        )
    if not math.isfinite(float(np.sum(signal, dtype=np.float64))):  # NaN and infinity propagate through a sum
        raise InvalidRequestError("a signal must hold finite numbers.", param=param, code="invalid_value")
    return signal, wanted.positions


def _text_after(input: PixelInput | AudioInput, positions: int, info: EngineInfo) -> tuple[int, ...]:
    """The tokens that an encoder reads after a signal of this many positions."""
    given = input.encoder_token_ids if isinstance(input, PixelInput) else None
    if not given:
        return ()
    if info.signal is None or not info.signal.texts:
        raise InvalidRequestError(
            "this model's encoder reads no text beside an image: leave encoder_token_ids out.",
            param="prompt",
            code="unsupported_parameter",
        )
    tokens = _checked("prompt", given, info.encoder_vocab_size or info.vocab_size)
    _check_encoder_room(positions + len(tokens), info)
    return tokens


def _check_encoder_room(length: int, info: EngineInfo) -> None:
    """Refuse an encoder's input that is too long."""
    assert info.max_encoder_len is not None
    if length > info.max_encoder_len:
        raise InvalidRequestError(
            f"the prompt is too long: it has {length} tokens, and the maximum context length of this model's encoder "
            f"is {info.max_encoder_len} tokens (max_model_len). Shorten the prompt or raise --max-model-len.",
            param="prompt",
            code="context_length_exceeded",
        )


def repeated(tokens: tuple[int, ...], repeats: RepeatedInput) -> tuple[int, ...]:
    """The decoder's input of a model that classifies by repeating the encoder's input. Raises InvalidRequestError if
    the input lacks the end token at which the class is computed."""
    if repeats.end not in tokens:
        raise InvalidRequestError(
            f"the input has no token {repeats.end} (EOS), which this model needs to classify. The tokenizer adds it "
            f"to texts; add it to token ids, and keep special tokens.",
            param="input",
            code="invalid_value",
        )
    last = len(tokens) - 1 - tokens[::-1].index(repeats.end)
    return (tokens[-1] if repeats.start is None else repeats.start, *tokens[:last])


def _split_after(tokens: tuple[int, ...], token: int) -> tuple[int, ...]:
    """Segments of tokens: 0 up to and including the first token with that id (or the very first token if there is
    none), then 1."""
    end = tokens.index(token) if token in tokens else 0
    return (*[0] * (end + 1), *[1] * (len(tokens) - end - 1))


def _decoder_begin(ids: Sequence[int], info: EngineInfo, start: int | None) -> tuple[int, ...]:
    """The decoder's first tokens: the start token, unless the request contains it."""
    begin = _checked("decoder_prompt", ids, info.vocab_size) if len(ids) else ()
    if start is None and not begin:
        raise InvalidRequestError(
            "this model does not say what its decoder begins with. Send decoder_start_token_id or decoder_prompt, or "
            "add decoder_start_token_id to its generation_config.json.",
            param="decoder_prompt",
        )
    return decoder_tokens(begin, start)


def decoder_start(params: SamplingParams, info: EngineInfo) -> int | None:
    """The decoder's first token: the request's own start token, or the model's; None if neither sets one. Raises
    InvalidRequestError if a request to a decoder-only model sets a start token, or the token is outside the vocabulary.
    """
    start = params.decoder_start_token_id
    if start is None:
        return info.decoder_start_token_id
    if info.max_encoder_len is None:
        raise InvalidRequestError(
            "decoder_start_token_id is for encoder-decoder models, but this is a decoder-only model: put the token "
            "before the prompt.",
            param="decoder_start_token_id",
            code="unsupported_parameter",
        )
    check_ids("decoder_start_token_id", (start,), info.vocab_size)
    return start


def decoder_tokens(begin: Sequence[int], start: int | None) -> tuple[int, ...]:
    """A decoder's first tokens: the start token, if the model has one, and the request's beginning of the answer, which
    may include the start token."""
    return tuple(begin) if start is None or tuple(begin[:1]) == (start,) else (start, *begin)


def _wrong_kind(input: object, info: EngineInfo, param: str) -> InvalidRequestError:
    kinds = [] if info.signal is None else [_KINDS[info.signal.kind]]
    if info.vocab_size and (info.signal is None or info.max_encoder_len is None):
        kinds.append("token ids")
    kind = "an encoder" if info.encoder_only else "a decoder-only model"
    if info.max_encoder_len is not None:
        kind = "an encoder-decoder model"
    name = "list of token ids" if isinstance(input, Sequence) else type(input).__name__
    return InvalidRequestError(
        f"this model is {kind} and accepts {' and '.join(kinds)}, not a {name}.", param=param, code="invalid_value"
    )


def _checked(name: str, ids: Any, vocab_size: int) -> tuple[int, ...]:
    listed = isinstance(ids, Sequence) and not isinstance(ids, (str, bytes))
    if not listed or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise InvalidRequestError(
            "the engine takes a list of token ids (integers); use LLM.generate for text.", param=name
        )
    if not ids:
        raise InvalidRequestError(f"the {name} is empty; it must hold at least one token.", param=name)
    check_ids(name, ids, vocab_size)
    return tuple(ids)


def check_terms(request_id: Any, priority: Any, cache_salt: Any, deadline: Any, tenant: Any) -> None:
    """Refuse invalid values of priority, cache salt, deadline and tenant."""
    for name, value, kinds, wanted in (
        ("request_id", request_id, (str,), "a string"),
        ("priority", priority, (int,), "an integer"),
        ("cache_salt", cache_salt, (str, type(None)), "a string or None"),
        ("deadline", deadline, (int, float, type(None)), "seconds of time.monotonic() or None"),
        ("tenant", tenant, (str, type(None)), "a string or None"),
    ):
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InvalidRequestError(f"{name} must be {wanted}, got {value!r}.", param=name, code="invalid_value")
