"""A request's fields about the decoder of an encoder-decoder model: the beginning of its answer, and the languages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from engine import SamplingParams
from engine.text.processor import Tokenizer
from server.answering.prompt import Room, check_length, check_token_ids, encode_fitting
from server.context import Service
from server.errors import ApiError, shown

# For each field, its demand on a decoder-only model, and the alternative there.
_ELSEWHERE = {
    "decoder_prompt": "end the prompt with the beginning of the answer",
    "forced_bos_token": "remove it",
    "src_lang": "describe the task in the prompt",
    "tgt_lang": "describe the task in the prompt",
}


@dataclass(frozen=True, slots=True)
class DecoderFields:
    """The beginning of an encoder-decoder model's answers."""

    prompt: str | list[int] | None = None  # the beginning, as text or token ids; None if the model begins itself
    first: int | None = None  # the token that the request forces; None if none
    start: int | None = None  # the decoder's start token, if the request sets it
    marked: str | None = None  # the language whose token marks the encoder's input, if the request names one

    def force(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with the request's tokens for the beginning."""
        params = params if self.first is None else replace(params, forced_bos_token_id=self.first)
        return params if self.start is None else replace(params, decoder_start_token_id=self.start)

    async def tokens(self, service: Service, params: SamplingParams) -> list[int]:
        """The decoder's first tokens after its start token.

        A text is preceded by the forced first token of the answer, unless it already contains it; ids are used
        unchanged. Raises ApiError if the text is far too long.
        """
        if not isinstance(self.prompt, str):
            return self.prompt or []
        tokenizer, info = service.tokenizer, service.client.info
        assert tokenizer is not None  # `read_decoder` requires one
        room = Room(info.max_model_len, "decoder_prompt")
        ids = await asyncio.to_thread(encode_fitting, tokenizer.encode_answer, self.prompt, room)
        first = params.forced_bos_token_id
        first = info.default_forced_bos_token_id if first is None else first
        start = info.decoder_start_token_id if params.decoder_start_token_id is None else params.decoder_start_token_id
        brought = first in ids[1:2] if ids[:1] == [start] else first in ids[:1]
        return ids if first is None or not ids or brought else [first, *ids]


def read_decoder(
    fields: Mapping[str, Any], prompts: Sequence[str | list[int]], service: Service
) -> DecoderFields | None:
    """Read the fields `decoder_prompt`, `forced_bos_token`, `src_lang` and `tgt_lang`; returns None for a decoder-only
    model. Raises ApiError, InvalidRequestError if the model does not support a field, fields contradict each other, or
    a token or language is unknown."""
    info = service.client.info
    given = {name: fields[name] for name in _ELSEWHERE if fields.get(name) is not None}
    if info.max_encoder_len is None:
        for name in given:
            message = f"{name} is for encoder-decoder models, but {service.model_id} is a decoder-only model:"
            _fail(name, f"{message} {_ELSEWHERE[name]}.", "unsupported_parameter")
        return None
    prompt, source = given.get("decoder_prompt"), given.get("src_lang")
    if isinstance(prompt, str):
        _tokenizer(service, "decoder_prompt")
    elif prompt is not None:
        check_length(len(prompt), Room(info.max_model_len, "decoder_prompt"))
        check_token_ids(prompt, info.vocab_size, "decoder_prompt")
    marked, target_marked = source, False
    if source is not None:
        languages = _tokenizer(service, "src_lang").languages
        if languages.marked_side == "target":
            _fail("src_lang", "src_lang: this model detects the language of its input. Remove it.")
        _check_marked("src_lang", source, fields, prompts, service)
    if "tgt_lang" in given and _tokenizer(service, "tgt_lang").languages.marked_side == "target":
        marked, target_marked = given["tgt_lang"], True
        _check_marked("tgt_lang", marked, fields, prompts, service)
    names = [name for name in ("forced_bos_token", "forced_bos_token_id", "tgt_lang") if fields.get(name) is not None]
    if len(names) > 1:
        _fail(names[1], f"{names[0]} and {names[1]} both set the first token of the answer. Send only one of them.")
    first, start = None, fields.get("decoder_start_token_id")
    if "tgt_lang" in given and not target_marked:
        languages = _tokenizer(service, "tgt_lang").languages
        first = languages.id(given["tgt_lang"], "tgt_lang")
        if languages.starts or info.decoder_start_token_id in languages.ids.values():
            if start is not None:
                _fail("tgt_lang", "decoder_start_token_id and tgt_lang both set the decoder's first token.")
            first, start = None, first
    elif "forced_bos_token" in given:
        first = _token(given["forced_bos_token"], service)
    if isinstance(prompt, list) and first is not None:
        _check_begins(prompt, first, names[0], info.decoder_start_token_id if start is None else start)
    return DecoderFields(prompt, first, start, marked)


def _check_marked(
    name: str, language: str, fields: Mapping[str, Any], prompts: Sequence[str | list[int]], service: Service
) -> None:
    """Refuse a language whose token cannot mark the encoder's input."""
    _tokenizer(service, name).languages.id(language, name)
    if not all(isinstance(prompt, str) for prompt in prompts):
        message = f"{name} affects how text is tokenised, but the prompt consists of token ids."
        _fail(name, f"{message} Put the language's token among them, and leave {name} out.")
    if fields.get("add_special_tokens") is False:
        _fail(name, f"{name} sets a special token; it cannot be used with add_special_tokens false.")


def _check_begins(prompt: Sequence[int], first: int, name: str, start: int | None) -> None:
    rest = prompt[1:] if prompt[0] == start else prompt
    if rest and rest[0] != first:
        message = (
            f"decoder_prompt consists of token ids, which are used unchanged, and does not begin with {name}'s {first}."
        )
        _fail(name, f"{message} Put it before them, or leave {name} out.")


def _token(given: int | str, service: Service) -> int:
    name, vocab_size = "forced_bos_token", service.client.info.vocab_size
    found = _tokenizer(service, name).token_id(given) if isinstance(given, str) else given
    if found is None:
        _fail(name, f"{name}: the vocabulary has no token {shown(given)}. Send one that it has, or its id.")
    check_token_ids([found], vocab_size, name)
    return found


def _tokenizer(service: Service, name: str) -> Tokenizer:
    if service.tokenizer is None:
        _fail(name, f"{service.model_id} has no tokenizer, which {name} needs; use token ids.", "no_tokenizer")
    return service.tokenizer


def refuse_chat(service: Service, param: str) -> None:
    """Refuse messages to an encoder-decoder model that reads texts, or to a model without a decoder. Raises ApiError:
    gives the reason."""
    if service.client.info.encoder_only:
        message = (
            f"{service.model_id} is an encoder-only model and does not support conversations. Send a text as prompt."
        )
        _fail(param, message, "no_chat")
    if service.client.info.max_encoder_len is not None and not service.sees:
        message = (
            f"{service.model_id} is an encoder-decoder model: it turns one input into one output and does not "
            "support conversations. Send the input as prompt to /v1/completions."
        )
        _fail(param, message, "no_chat")


def refuse_echo(service: Service) -> None:
    """Refuse to begin an encoder-decoder model's answer with its prompt. Raises ApiError: gives the reason."""
    if service.client.info.max_encoder_len is not None:
        message = (
            f"echo: {service.model_id} is an encoder-decoder model, whose answer does not continue the prompt. For "
            "the log-probabilities of a given answer, send it as decoder_prompt, with prompt_logprobs."
        )
        _fail("echo", message, "unsupported_parameter")


def _fail(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    raise ApiError(400, message, param=param, code=code)
