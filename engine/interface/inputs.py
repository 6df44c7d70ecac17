"""A request's input and terms, checked at the border."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.errors import InvalidRequestError
from engine.interface.generation import check_ids
from engine.interface.outputs import EngineInfo, RepeatedInput
from engine.interface.request import EngineInput, PixelInput, SamplingParams, Seq2SeqInput, TokenInput


def read_input(input: EngineInput, info: EngineInfo, *, start: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The encoder's input, () for a decoder-only model, and the (first) tokens of the decoder.

    Args:
        start: what the decoder of this encoder-decoder model begins with, None if the model does not say.

    Raises:
        InvalidRequestError: not the kind of input that the model takes, empty, too long, or outside the vocabulary.
    """
    if info.max_encoder_len is None:
        if isinstance(input, Seq2SeqInput | PixelInput):
            raise _wrong_kind(input, info.model, "a decoder-only")
        if not isinstance(input, TokenInput):
            return (), _checked("prompt", input, info.vocab_size)
        tokens = _checked("prompt", input.token_ids, info.vocab_size)
        _token_types(input.token_type_ids, len(tokens), info)  # none but the first segment, which changes nothing
        return (), tokens
    if isinstance(input, PixelInput):
        raise _wrong_kind(input, info.model, "an encoder-decoder")
    begin: Sequence[int] = ()
    ids: Any = input
    if isinstance(input, Seq2SeqInput):
        ids, begin = input.encoder_token_ids, input.decoder_token_ids or ()
    elif isinstance(input, TokenInput):
        ids = input.token_ids
    encoder_input = _checked("prompt", ids, info.encoder_vocab_size or info.vocab_size)
    if len(encoder_input) > info.max_encoder_len:
        raise InvalidRequestError(
            f"the prompt is too long: it has {len(encoder_input)} tokens, and the maximum context length of this "
            f"model's encoder is {info.max_encoder_len} tokens (max_model_len). Shorten the prompt or raise "
            "--max-model-len.",
            param="prompt",
            code="context_length_exceeded",
        )
    return encoder_input, _decoder_begin(begin, info, start)


def read_pooling_input(input: EngineInput, info: EngineInfo) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens of an input to pool, and their segments; () where all are of the first.

    Raises:
        InvalidRequestError: not the kind of input that the model takes, empty, too long, or outside the vocabulary.
    """
    if isinstance(input, Seq2SeqInput | PixelInput):
        raise _wrong_kind(input, info.model, "no encoder-decoder")
    ids: Any = input.token_ids if isinstance(input, TokenInput) else input
    tokens = _checked("input", ids, info.vocab_size)
    if len(tokens) > info.max_model_len:
        raise InvalidRequestError(
            f"the input is too long: it has {len(tokens)} tokens, and this model takes at most {info.max_model_len} "
            "(max_model_len). Shorten it, send truncate_prompt_tokens, or raise --max-model-len.",
            param="input",
            code="context_length_exceeded",
        )
    return tokens, _token_types(input.token_type_ids, len(tokens), info) if isinstance(input, TokenInput) else ()


def repeated(tokens: tuple[int, ...], repeats: RepeatedInput) -> tuple[int, ...]:
    """What a decoder reads of an input to classify it.

    Raises:
        InvalidRequestError: the input has no end, where its class would be read off.
    """
    if repeats.end not in tokens:
        raise InvalidRequestError(
            f"the input has no token {repeats.end} (EOS), where this model reads a class off. Its tokenizer adds one "
            "to a text; add it to token ids, and leave special tokens in.",
            param="input",
            code="invalid_value",
        )
    last = len(tokens) - 1 - tokens[::-1].index(repeats.end)
    return (tokens[-1] if repeats.start is None else repeats.start, *tokens[:last])


def _token_types(types: Any, count: int, info: EngineInfo) -> tuple[int, ...]:
    if types is None:
        return ()
    name = "token_type_ids"
    if not isinstance(types, Sequence) or isinstance(types, (str, bytes)):
        raise InvalidRequestError(f"{name} must be a list of integers, got {types!r}.", param=name)
    if len(types) != count:
        raise InvalidRequestError(f"{name} has {len(types)} entries for {count} tokens.", param=name)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in types):
        raise InvalidRequestError(f"{name} must hold integers.", param=name)
    check_ids(name, types, max(info.token_types, 1))
    return tuple(types) if any(types) else ()


def _decoder_begin(ids: Sequence[int], info: EngineInfo, start: int | None) -> tuple[int, ...]:
    """The decoder's first tokens: the start token, unless the request brings it itself."""
    begin = _checked("decoder_prompt", ids, info.vocab_size) if len(ids) else ()
    if start is None and not begin:
        raise InvalidRequestError(
            "this model does not say what its decoder begins with. Send decoder_start_token_id or decoder_prompt, or "
            "add decoder_start_token_id to its generation_config.json.",
            param="decoder_prompt",
        )
    return decoder_tokens(begin, start)


def decoder_start(params: SamplingParams, info: EngineInfo) -> int | None:
    """What the decoder begins with: the request's own start token, or the model's; None if neither says.

    Raises:
        InvalidRequestError: a start token for a decoder-only model, or outside the vocabulary.
    """
    start = params.decoder_start_token_id
    if start is None:
        return info.decoder_start_token_id
    if info.max_encoder_len is None:
        raise InvalidRequestError(
            "decoder_start_token_id is for encoder-decoder models, and this is a decoder-only model: put the token in "
            "front of the prompt.",
            param="decoder_start_token_id",
            code="unsupported_parameter",
        )
    check_ids("decoder_start_token_id", (start,), info.vocab_size)
    return start


def decoder_tokens(begin: Sequence[int], start: int | None) -> tuple[int, ...]:
    """A decoder's first tokens: the start token, if the model has one, and what the request brings of the answer; it
    may bring the start token, too."""
    return tuple(begin) if start is None or tuple(begin[:1]) == (start,) else (start, *begin)


def _wrong_kind(input: object, model: str, kind: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{model} is {kind} model and takes token ids, not a {type(input).__name__}.", param="prompt"
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
    """Refuse what cannot order, salt or end a request, or name its tenant."""
    for name, value, kinds, wanted in (
        ("request_id", request_id, (str,), "a string"),
        ("priority", priority, (int,), "an integer"),
        ("cache_salt", cache_salt, (str, type(None)), "a string or None"),
        ("deadline", deadline, (int, float, type(None)), "seconds of time.monotonic() or None"),
        ("tenant", tenant, (str, type(None)), "a string or None"),
    ):
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise InvalidRequestError(f"{name} must be {wanted}, got {value!r}.", param=name, code="invalid_value")
