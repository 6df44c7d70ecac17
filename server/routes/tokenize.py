"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
import functools
from typing import Annotated

from fastapi import APIRouter, Body, Response
from pydantic import BaseModel, Field

from engine.text.processor import Tokenizer
from server.admission import estimate_tokens
from server.answering.conversation import pictures_for
from server.answering.messages import estimate_messages, read_messages
from server.answering.prompt import MAX_TOKENIZED, Room, check_token_ids, encode_fitting
from server.answering.rendering import read_rendering
from server.answering.seq2seq import read_decoder, refuse_chat
from server.answering.tools import read_tools
from server.api import examples
from server.api.base import JsonBody
from server.api.chat_schemas import Messages
from server.api.fields import ignored_header, refuse_unsupported
from server.api.pooling_schemas import either
from server.api.reading import StrictJsonRoute
from server.api.schemas import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from server.api.template_fields import TemplateFields
from server.context import Service, ServiceDep
from server.errors import ApiError

router = APIRouter(route_class=StrictJsonRoute)


class ApplyTemplateRequest(TemplateFields, JsonBody):
    """Body of POST /apply-template: the fields of /v1/chat/completions that affect the prompt."""

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    messages: Messages = Field(description="Messages, as for /v1/chat/completions.")


class ApplyTemplateResponse(BaseModel):
    """Answer of POST /apply-template."""

    prompt: str


class _Countable(Room):
    """The limit for texts that are only tokenised: any length is valid, so they need not fit into the model."""

    def refusal(self, length: str, tokens: int = 0) -> ApiError:
        message = (
            f"{self.param} is too long for one request: {length} tokens, but the limit is {self.tokens} (the "
            f"larger of {MAX_TOKENIZED} and max_model_len). Send it in parts."
        )
        return ApiError(400, message, param=self.param, code="context_length_exceeded")

    @classmethod
    def of(cls, service: Service, param: str) -> _Countable:
        """The limit for one request."""
        return cls(max(Room.of_prompt(service.client.info).tokens, MAX_TOKENIZED), param)


@router.post("/tokenize", summary="Tokenize text or messages")
async def tokenize(
    body: Annotated[TokenizeRequest, Body(openapi_examples=examples.TOKENIZE)], response: Response, service: ServiceDep
) -> TokenizeResponse:
    """Return the token ids of a prompt for /v1/completions, or of messages for /v1/chat/completions."""
    _check(body, response, service)
    tokenizer = _tokenizer(service, "prompt" if body.messages is None else "messages")
    given = either(body, "prompt", "content")
    if (given is None) == (body.messages is None):
        got = "neither" if given is None else "both"
        message = f"Send either prompt, a string, or messages, a list; got {got}."
        raise ApiError(400, message, param="prompt", code="invalid_value")
    if body.messages is not None:
        if body.add_special_tokens:
            message = "add_special_tokens cannot be used with messages: the chat template writes the special tokens."
            raise ApiError(400, message, param="add_special_tokens", code="invalid_value")
        if body.src_lang is not None:
            raise ApiError(
                400, "src_lang is only allowed with prompt, not with messages.", param="src_lang", code="invalid_value"
            )
        refuse_chat(service, "messages")
        pictures = pictures_for(service)
        messages, tools = read_messages(body.messages, pictures), read_tools(body.tools)
        rendering = read_rendering(body, tools)
        with await service.tokenizing.admit(1, estimate_messages(messages) + rendering.num_tokens):
            room = _Countable.of(service, "messages")
            prompt = await service.render(messages, room, rendering, pictures=pictures)
        tokens = prompt.token_ids
    else:
        for name in ("tools", "documents", "chat_template_kwargs", "reasoning_effort", "continue_final_message"):
            if getattr(body, name):
                raise ApiError(
                    400, f"{name} is only allowed with messages, not with prompt.", param=name, code="invalid_value"
                )
        special = body.add_special_tokens is not False
        text = given or ""
        asked = {"src_lang": body.src_lang, "add_special_tokens": body.add_special_tokens}
        read_decoder(asked, [text], service)
        with await service.tokenizing.admit(1, estimate_tokens(text)):
            encode = functools.partial(tokenizer.encode, add_special_tokens=special, src_lang=body.src_lang)
            room = _Countable.of(service, "prompt")
            tokens = await asyncio.to_thread(encode_fitting, encode, text, room)
    if len(tokens) > room.tokens:
        raise room.refusal(f"it has {len(tokens)}")
    longest = Room.of_prompt(service.client.info).tokens
    names = None
    if body.return_token_strs:
        names = await asyncio.to_thread(lambda: [tokenizer.written(token) for token in tokens])
    return TokenizeResponse(count=len(tokens), max_model_len=longest, tokens=tokens, token_strs=names)


@router.post("/apply-template", summary="Apply the chat template")
async def apply_template(
    body: Annotated[ApplyTemplateRequest, Body(openapi_examples=examples.CHAT)], response: Response, service: ServiceDep
) -> ApplyTemplateResponse:
    """Render messages with the chat template, as in llama.cpp."""
    service.check_model(body.model)
    service.require("/v1/chat/completions")
    refuse_unsupported({"chat_template": (body.model_extra or {}).get("chat_template")})
    response.headers.update(ignored_header(body.ignored_fields()))
    messages, tools = read_messages(body.messages), read_tools(body.tools)
    rendering = read_rendering(body, tools)
    with await service.tokenizing.admit(1, estimate_messages(messages) + rendering.num_tokens):
        prompt = await service.render(messages, _Countable.of(service, "messages"), rendering)
    return ApplyTemplateResponse(prompt=prompt.text or "")


@router.post("/detokenize", summary="Detokenize token ids")
async def detokenize(
    body: Annotated[DetokenizeRequest, Body(openapi_examples=examples.DETOKENIZE)],
    response: Response,
    service: ServiceDep,
) -> DetokenizeResponse:
    """Return the text of token ids, including special tokens."""
    _check(body, response, service)
    tokenizer = _tokenizer(service, "tokens")
    room = _Countable.of(service, "tokens")
    if len(body.tokens) > room.tokens:
        raise room.refusal(f"it has {len(body.tokens)}")
    check_token_ids(body.tokens, service.client.info.vocab_size, "tokens")
    with await service.tokenizing.admit(1, len(body.tokens)):
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
    return DetokenizeResponse(prompt=text, content=text)


def _check(body: TokenizeRequest | DetokenizeRequest, response: Response, service: Service) -> None:
    service.check_model(body.model)
    body.refuse_unsupported()
    response.headers.update(ignored_header(body.ignored_fields()))


def _tokenizer(service: Service, param: str) -> Tokenizer:
    if service.tokenizer is None:
        raise ApiError(400, f"{service.model_id} has no tokenizer.", param=param, code="no_tokenizer")
    return service.tokenizer
