"""POST /translate and GET /languages, in LibreTranslate's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from engine import EngineInfo
from engine.text.processor import Tokenizer
from server.answering.endpoints import NO_TOKENIZER, kind_of
from server.answering.seq2seq import DecoderFields, read_decoder
from server.api.examples import example
from server.api.fields import Name, at_most
from server.api.parameters import shape_of
from server.api.schemas import MAX_PROMPTS, CompletionChoice, CompletionRequest, ServedBody, Usage
from server.api.urlencoded import KIND, PARTS, FormOrJsonRoute
from server.context import Service, ServiceDep
from server.errors import ApiError, shown
from server.routes.completions import CompletionRun
from server.routes.task_router import TaskCall, TaskRouter

ENDPOINT = "/translate"
_NAMES = {"prompt": "q", "src_lang": "source", "tgt_lang": "target", "n": "alternatives", "num_beams": "alternatives"}

_SCHEMA = {"schema": {"$ref": "#/components/schemas/TranslateRequest"}}
_FORM = {"requestBody": {"content": {KIND: _SCHEMA, PARTS: _SCHEMA}}}
router = TaskRouter("generating", route_class=FormOrJsonRoute)


Texts = Annotated[Annotated[list[str], Field(min_length=1, fail_fast=True)], at_most(MAX_PROMPTS, "texts")]


class TranslateRequest(ServedBody):
    """Body of POST /translate. All fields but q, source and target may be null, which means the default."""

    q: str | Texts = Field(description="One text or several.")
    source: Name = Field(
        description="Language of the texts, by its code in GET /languages; auto if the model detects it."
    )
    target: Name = Field(description="Language to translate to.")
    format: Name | None = Field(None, description="text; html is not supported.")
    alternatives: int | None = Field(None, ge=0, description="Maximum number of alternative translations per text (0).")
    api_key: Name | None = Field(None, description="Ignored; send API keys in the header Authorization.")
    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")


class TranslateResponse(BaseModel):
    """Answer of POST /translate: a text if q is a text, a list if q is a list."""

    translatedText: str | list[str]
    alternatives: list[str] | list[list[str]] | None = Field(
        None, description="Alternative translations, best first and without duplicates, if requested."
    )


class Language(BaseModel):
    """A source language with its target languages."""

    code: str
    name: str = Field(description="Same as the code, because tokenizers do not contain names.")
    targets: list[str]


_EXAMPLES: dict[str, Any] = {
    "simple": example("A text", q="The ship is in the harbour.", source="en", target="de"),
    "several": example(
        "Several texts, with another translation of each",
        q=["Good morning.", "It rains."],
        source="en",
        target="de",
        alternatives=1,
    ),
}


listing = APIRouter()


@listing.get("/languages", summary="List languages for translation")
async def list_languages(service: ServiceDep) -> list[Language]:
    """List the source languages of the model, each with its target languages."""
    service.require(ENDPOINT)
    languages = _tokenizer(service).languages
    if languages.pair is not None and not languages.ids:
        source, target = languages.pair
        return [Language(code=source, name=source, targets=[target])]
    codes = list(languages.ids)
    return [Language(code=one, name=one, targets=[code for code in codes if code != one]) for one in codes]


def _lacks(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if info.max_encoder_len is None:
        return f"{kind_of(info)}, and it does not know languages by code"
    if tokenizer is None:
        return NO_TOKENIZER
    known = tokenizer.languages.ids or tokenizer.languages.pair
    return None if known else "its tokenizer names no languages"


@router.endpoint(
    ENDPOINT,
    response_model=TranslateResponse,
    examples=_EXAMPLES,
    lacks=_lacks,
    openapi_extra=_FORM,
    summary="Translate texts",
)
async def translate(call: TaskCall[TranslateRequest]) -> Response:
    """Translate one or several texts in one batch. The number of beams comes from the model's
    generation_config.json."""
    service, body = call.service, call.body
    if body.format not in (None, "", "text"):
        message = (
            f"format must be text, got {shown(body.format)}: markup would be translated like text. Send plain text."
        )
        raise ApiError(400, message, param="format", code="unsupported_parameter")
    texts = [body.q] if isinstance(body.q, str) else body.q
    decoder = _decoder(body, texts, service)
    asked = _completion(body, texts, service)
    shape = shape_of(asked, service)
    if decoder is not None:
        shape = replace(shape, params=decoder.force(shape.params))
    run = _TranslationRun(service, asked, shape, call.arrival, decoder=decoder, given=body)
    return await run.respond(call.request)


def _tokenizer(service: Service) -> Tokenizer:
    assert service.tokenizer is not None  # `require` demands one
    return service.tokenizer


def _decoder(body: TranslateRequest, texts: Sequence[str], service: Service) -> DecoderFields | None:
    """The fields of encoder and decoder for the languages. Raises ApiError, InvalidRequestError if the model cannot
    translate between these languages."""
    languages = _tokenizer(service).languages
    if languages.pair is not None and not languages.ids:
        for name, given, only in zip(("source", "target"), (body.source, body.target), languages.pair, strict=True):
            if given != only and (name, given) != ("source", "auto"):
                pair = " to ".join(languages.pair)
                message = f"{name}: {service.model_id} translates {pair} only, got {shown(given)}."
                raise ApiError(400, message, param=name, code="invalid_value")
        return read_decoder({}, texts, service)
    fields = {"tgt_lang": body.target}
    languages.id(body.target, "target")
    if languages.marked_side == "target":
        if body.source != "auto":
            languages.id(body.source, "source")  # checked; the model detects it itself
    elif body.source == "auto":
        message = "source: the model does not detect languages. Send a code from GET /languages."
        raise ApiError(400, message, param="source", code="unsupported_parameter")
    else:
        languages.id(body.source, "source")
        fields["src_lang"] = body.source
    return read_decoder(fields, texts, service)


def _completion(body: TranslateRequest, texts: list[str], service: Service) -> CompletionRequest:
    """The equivalent completion request: the most probable translations, as long as the model makes them."""
    info, count = service.client.info, 1 + (body.alternatives or 0)
    most = min(service.settings.max_n, info.max_num_beams)
    if count > most:
        message = (
            f"alternatives is {body.alternatives}, but at most {most - 1} are allowed (max_n and "
            f"max_num_beams, minus one). Lower it, or raise --max-n and --max-num-beams."
        )
        raise ApiError(400, message, param="alternatives", code="invalid_value")
    how: dict[str, Any] = {}
    if info.default_max_new_tokens is None and info.default_max_length is None:
        how["max_tokens"] = info.max_model_len - 1  # the decoder's start token takes one token
    if count > 1:
        how |= {"n": count, "num_beams": max(count, info.default_num_beams)}
    elif info.default_num_beams == 1:
        how["temperature"] = 0.0
    return CompletionRequest(
        prompt=texts,
        model=body.model,
        cache_salt=body.cache_salt,
        priority=body.priority,
        request_timeout=body.request_timeout,
        **how,
    )


@dataclass(slots=True)
class _TranslationRun(CompletionRun):
    id_prefix = "trans-"
    given: TranslateRequest = field(kw_only=True)

    def ignored_fields(self) -> list[str]:
        return self.given.ignored_fields()

    def public_name(self, param: str | None) -> str | None:
        return None if param is None else _NAMES.get(param, param)

    def whole(self, choices: list[CompletionChoice], usage: Usage) -> BaseModel:
        texts = [choice.text.strip() for choice in choices]
        size = self.shape.n
        best, others = texts[::size], [_further(texts[at : at + size]) for at in range(0, len(texts), size)]
        one = isinstance(self.given.q, str)
        extra: dict[str, Any] = {"alternatives": others[0] if one else others} if self.shape.n > 1 else {}
        return TranslateResponse(translatedText=best[0] if one else best, **extra)


def _further(texts: Sequence[str]) -> list[str]:
    """The texts that differ from the first one and from each other, in order: different tokens may give the same
    text."""
    return [text for text in dict.fromkeys(texts) if text not in ("", texts[0])]
