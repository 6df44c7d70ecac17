"""POST /api/chat and /api/generate, in Ollama's shapes, over the code that answers chats and completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import Body, Depends, Request, Response
from pydantic import RootModel

from engine import CHAT_ROOM
from server.answering.answer import Run
from server.answering.chat import ChatPieces
from server.answering.ollama_events import NDJSON, Line, OllamaEvents, OllamaForm, OllamaRun, failure, whole_of
from server.answering.ollama_input import NAMES, check_generate, find_model, read_chat, read_options
from server.answering.pieces import PieceMaker
from server.answering.prompt import Prompt
from server.answering.public_names import public_name, public_names, valid
from server.answering.reading import Ignored
from server.api import examples
from server.api.chat_schemas import ChatPiece
from server.api.fields import ignored_header
from server.api.ollama_schemas import (
    OllamaAnswerBody,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaError,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
)
from server.api.reading import READ_BODY, UntypedJsonRoute
from server.api.schemas import CompletionRequest, Usage
from server.context import Service, get_house, get_service
from server.errors import ApiError
from server.routes.completions import CompletionRun
from server.routes.task_router import TaskRouter

router = TaskRouter("generating", one_text=True, route_class=UntypedJsonRoute)

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": OllamaError, "description": "Client error."},
    "5XX": {"model": OllamaError, "description": "Server error."},
}


async def _get_service(request: Request) -> Service | None:
    """The model's service; None if the request only unloads a model of several that is not loaded."""
    body, models = request.scope[READ_BODY], (await get_house(request)).models
    unloads = body.model and body.keep_alive == 0 and _is_empty(body)
    if unloads and models is not None and models.choose(request, body.model).state in ("unloaded", "failed"):
        return None
    return await get_service(request)


def _is_empty(body: OllamaAnswerBody) -> bool:
    """Whether the request asks for no answer: clients load and unload models so."""
    if isinstance(body, OllamaGenerateRequest):
        return not (body.prompt or body.suffix or body.images)
    return isinstance(body, OllamaChatRequest) and not body.messages


_ServiceDep = Annotated[Service | None, Depends(_get_service)]


@router.post(
    "/api/chat",
    response_model=OllamaChatAnswer,
    responses={200: {"content": examples.LINES}, **ERRORS},
    summary="Ollama's chat",
)
async def chat(
    body: Annotated[OllamaChatRequest, Body(openapi_examples=examples.OLLAMA_CHAT)],
    request: Request,
    service: _ServiceDep,
) -> Response:
    """Generate the assistant's next message, as in Ollama's API: as lines of JSON, or whole with `stream: false`."""
    arrival = time.monotonic()
    if service is None:
        return _loaded(body, OllamaForm(body.model or "", chat=True))
    model = find_model(service, body.model)
    service.require("/v1/chat/completions")
    form = OllamaForm(body.model or service.model_id, chat=True)
    if body.messages is None or _is_empty(body):
        return _loaded(body, form, service)
    ignored = Ignored(sees=service.sees)
    asked = read_chat(body, body.messages, model, service, ignored)
    with public_names(NAMES):
        run = OllamaRun.of(asked, service, arrival, form=form, ignored=ignored)
    return await run.respond(request)


@router.post(
    "/api/generate",
    response_model=OllamaGenerateAnswer,
    responses={200: {"content": examples.LINES}, **ERRORS},
    summary="Ollama's completion",
)
async def generate(
    body: Annotated[OllamaGenerateRequest, Body(openapi_examples=examples.OLLAMA_GENERATE)],
    request: Request,
    service: _ServiceDep,
) -> Response:
    """Answer a prompt, as in Ollama's API: as lines of JSON, or whole with `stream: false`. The chat template makes a
    conversation of the prompt, unless `raw` or `suffix` is set or the model has no template."""
    arrival = time.monotonic()
    if service is None:
        return _loaded(body, OllamaForm(body.model or "", chat=False))
    model, info, tokenizer = find_model(service, body.model), service.client.info, service.tokenizer
    is_plain = bool(body.raw or body.suffix)
    service.require("/v1/chat/completions" if info.writes_of_images and not is_plain else "/v1/completions")
    check_generate(body, sees=service.sees)
    form = OllamaForm(body.model or service.model_id, chat=False)
    if _is_empty(body):
        return _loaded(body, form, service)
    ignored = Ignored(sees=service.sees)
    templated = tokenizer is not None and tokenizer.chat_template is not None and info.max_encoder_len is None
    if is_plain or not (templated or info.writes_of_images):
        return await _raw_run(body, model, service, arrival, form, ignored).respond(request)
    messages: list[dict[str, Any]] = [{"role": "user", "content": body.prompt or "", "images": body.images}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    asked = read_chat(body, messages, model, service, ignored)
    before = body.context or []
    _check_context(before, service)
    with public_names(NAMES):
        run = _TextRun.of(
            asked, service, arrival, form=replace(form, context=templated), before=before, ignored=ignored
        )
    return await run.respond(request)


def _loaded(body: OllamaAnswerBody, form: OllamaForm, service: Service | None = None) -> Response:
    """The answer to a request without a prompt, with which clients load and unload models. A single model stays
    loaded."""
    unloads = body.keep_alive == 0
    headers = ignored_header(["keep_alive"]) if unloads and service is not None and service.models is None else {}
    line = form.ended("unload" if unloads else "load")
    return Response(RootModel[Line](line).model_dump_json(), media_type="application/json", headers=headers)


def _check_context(ids: list[int], service: Service) -> None:
    size = service.client.info.vocab_size
    wrong = next((token for token in ids if not 0 <= token < size), None)
    if wrong is not None:
        message = f"context: token ids must be from 0 to {size - 1}, got {wrong}. Send the context of an answer."
        raise ApiError(400, message, param="context", code="invalid_value")


class _TextRun(OllamaRun):
    def public_name(self, param: str | None) -> str | None:
        name = public_name(param, NAMES)
        return "prompt" if name is not None and name.startswith("messages") else name


def _raw_run(
    body: OllamaGenerateRequest, model: str | None, service: Service, arrival: float, form: OllamaForm, ignored: Ignored
) -> _RawRun:
    """The run of a prompt that the chat template does not change. Raises ApiError, InvalidRequestError: something in
    the body is wrong, or not supported."""
    fields = read_options(body, service, ignored)
    if body.logprobs or body.top_logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    ignored.update(name for name in ("system", "context") if getattr(body, name))
    if body.think:
        ignored.add("think")
    fields |= {"model": model, "prompt": body.prompt or "", "suffix": body.suffix}
    asked = valid(CompletionRequest, fields, NAMES)
    with public_names(NAMES):
        inner = CompletionRun.of(asked, service, arrival)
    return _RawRun(service, asked, inner.shape, arrival, inner=inner, form=form, ignored=ignored)


@dataclass(slots=True)
class _RawRun(Run[ChatPiece, ChatPiece]):
    id_prefix = "ollama-"
    bytes_per_logprob = 400
    usual_answer = CHAT_ROOM
    stream_type = NDJSON
    inner: CompletionRun = field(kw_only=True)
    form: OllamaForm = field(kw_only=True)
    ignored: Ignored = field(kw_only=True)
    asked: list[Prompt] = field(default_factory=list)

    def size(self) -> tuple[int, int]:
        return self.inner.size()

    async def prompts(self) -> list[Prompt]:
        with public_names(NAMES):
            self.asked = await self.inner.prompts()
            self.fill_room(len(self.asked[0].continued))
        return self.asked

    def maker(self, prompts: list[Prompt]) -> ChatPieces:
        return ChatPieces(prompts, self.shape, self.service.tokenizer)

    def join(self, pieces: list[ChatPiece]) -> list[ChatPiece]:
        return pieces

    def whole(self, choices: list[ChatPiece], usage: Usage) -> RootModel[Line]:
        return RootModel[Line].model_construct(whole_of(self.form, choices, usage, self.record, self.asked[0]))

    def events(self, maker: PieceMaker[ChatPiece]) -> OllamaEvents:
        return OllamaEvents(maker, self.form, self.record)

    def failing(self, problem: ApiError) -> str:
        return failure(problem)

    def ignored_fields(self) -> list[str]:
        return sorted(self.ignored)

    def public_name(self, param: str | None) -> str | None:
        return public_name(param, NAMES)
