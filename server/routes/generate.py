"""vLLM's routes that divide a request in two: /render makes token ids, /inference/v1/generate continues them."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from pydantic import BaseModel

from engine import DEFAULT_MAX_TOKENS, SamplingParams, chat_max_tokens
from server.answering import message_input
from server.answering.answer import encode_prompts, estimate_size
from server.answering.completion import TextRun
from server.answering.endpoints import lacks_generation
from server.answering.events import ChunkEvents, Extra
from server.answering.message_events import MessageRun
from server.answering.pieces import PieceMaker
from server.answering.prompt import Prompt
from server.answering.public_names import public_names
from server.answering.responses import NAMES as RESPONSE_NAMES
from server.answering.responses import ResponseRun
from server.answering.terms import read_terms
from server.api import examples
from server.api.chat_schemas import ChatCompletionRequest
from server.api.generate_schemas import (
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    RenderedRequest,
    TokenLogprob,
    TokenLogprobContent,
    TokenLogprobs,
)
from server.api.message_schemas import MessageRequest
from server.api.parameters import shape_of
from server.api.reading import StrictJsonRoute
from server.api.response_schemas import ResponseRequest
from server.api.schemas import CompletionChoice, CompletionRequest, GenerationBody, Usage
from server.context import Service, ServiceDep
from server.door.message_errors import MESSAGES_PATH
from server.errors import ApiError
from server.routes import messages, responses
from server.routes.chat import ChatRun
from server.routes.completions import CompletionRun
from server.routes.task_router import TaskCall, TaskRouter

router = TaskRouter("generating", one_text=True)
rendering = APIRouter(route_class=StrictJsonRoute)

# Fields about the form of the answer that /inference/v1/generate lacks.
_NOT_RENDERED = ("return_tokens_as_token_ids", "timings", "timings_per_token")


@rendering.post("/v1/completions/render", summary="Render prompts to token ids")
async def render_completion(
    body: Annotated[CompletionRequest, Body(openapi_examples=examples.RENDER)],
    request: Request,
    response: Response,
    service: ServiceDep,
) -> list[RenderedRequest]:
    """Return a request body for /inference/v1/generate for each prompt."""
    service.check_model(body.model)
    service.require("/inference/v1/generate")
    _refuse_echo(body.echo)
    run = CompletionRun.of(body, service, time.monotonic())
    return await _rendered(run, "cmpl-", request, response)


@rendering.post("/v1/chat/completions/render", summary="Render messages to token ids")
async def render_chat(
    body: Annotated[ChatCompletionRequest, Body(openapi_examples=examples.CHAT)],
    request: Request,
    response: Response,
    service: ServiceDep,
) -> RenderedRequest:
    """Return a request body for /inference/v1/generate."""
    service.check_model(body.model)
    service.require("/v1/chat/completions")
    _refuse_echo(body.echo)
    (made,) = await _rendered(ChatRun.of(body, service, time.monotonic()), "chatcmpl-", request, response)
    return made


@rendering.post(f"{MESSAGES_PATH}/render", responses=messages.ERRORS, summary="Render Anthropic's messages")
async def render_message(
    body: Annotated[MessageRequest, Body(openapi_examples=examples.MESSAGES)],
    request: Request,
    response: Response,
    service: ServiceDep,
) -> RenderedRequest:
    """Return a request body for /inference/v1/generate."""
    with public_names(message_input.NAMES):
        (made,) = await _rendered(messages.run_of(body, service, time.monotonic()), "msg_", request, response)
    return made


@rendering.post("/v1/responses/render", summary="Render a response's input")
async def render_response(
    body: Annotated[ResponseRequest, Body(openapi_examples=examples.RESPONSES)],
    request: Request,
    response: Response,
    service: ServiceDep,
) -> RenderedRequest:
    """Return a request body for /inference/v1/generate. Nothing is stored."""
    run = await responses.run_of(body, request, service, time.monotonic())
    with public_names(RESPONSE_NAMES):
        (made,) = await _rendered(run, "resp_", request, response)
    return made


async def _rendered(
    run: CompletionRun | ChatRun | MessageRun | ResponseRun, prefix: str, request: Request, response: Response
) -> list[RenderedRequest]:
    body, service = run.body, run.service
    if run.shape.params.n > run.shape.n:
        message = (
            f"best_of ({body.best_of}) above n ({run.shape.n}) cannot be rendered: /inference/v1/generate does not "
            "choose among answers for another request. Leave best_of out, or send the whole request to the route "
            "without /render."
        )
        raise ApiError(400, message, param="best_of", code="unsupported_parameter")
    run.terms = read_terms(body, request, service.settings, run.arrival, service.client.adapters)
    run.leave_out(*run.ignored_fields(), *_given_names(body, _NOT_RENDERED))
    with await service.tokenizing.admit(*run.size(), run.terms.tenant, run.terms.deadline):
        prompts = await run.prompts()
    if any(prompt.images for prompt in prompts):
        message = (
            "A prompt with images cannot be rendered, because token ids do not carry images. Send the request to the "
            "route without /render."
        )
        raise ApiError(400, message, param="messages", code="unsupported_parameter")
    response.headers.update(run.headers)
    base = f"{prefix}{uuid.uuid4().hex}"
    options = body.stream_options
    return [
        RenderedRequest(
            request_id=base if len(prompts) == 1 else f"{base}-{place}",
            token_ids=prompt.token_ids,
            sampling_params=_given(_with_default(run.shape.params, service, len(prompt.token_ids))),
            model=service.name_of(run.terms),
            stream=bool(body.stream),
            stream_options=None if options is None else options.model_dump(exclude_none=True),
            return_token_ids=body.return_token_ids,
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
            request_timeout=body.request_timeout,
        )
        for place, prompt in enumerate(prompts)
    ]


def _refuse_echo(echo: bool | None) -> None:
    if echo:
        message = "echo cannot be rendered: /inference/v1/generate returns the answer only. Leave echo out."
        raise ApiError(400, message, param="echo", code="unsupported_parameter")


def _given_names(body: BaseModel, names: Iterable[str]) -> list[str]:
    """The names among these whose fields have a value other than the neutral one."""
    return [name for name in names if getattr(body, name) not in (None, False)]


def _with_default(params: SamplingParams, service: Service, length: int) -> SamplingParams:
    """The parameters with the default max_tokens of /v1/completions, which /inference/v1/generate lacks."""
    info: Any = service.client.info
    if params.max_tokens is not None or chat_max_tokens(params, info, length) is None:
        return params
    room = max(info.max_model_len - length, 1)
    return replace(params, max_tokens=min(max(DEFAULT_MAX_TOKENS, params.min_tokens or 0), room))


def _given(params: Any) -> dict[str, Any]:
    found = {}
    for each in dataclasses.fields(params):
        value = getattr(params, each.name)
        if value is not None and value != each.default:
            found[each.name] = _given(value) if dataclasses.is_dataclass(value) else value
    return found


@router.endpoint(
    "/inference/v1/generate",
    response_model=GenerateResponse,
    examples=examples.GENERATE,
    events=examples.EVENT_STREAM,
    lacks=lacks_generation,
    summary="Generate token ids from token ids",
)
async def generate(call: TaskCall[GenerateRequest]) -> Response:
    """Generate from token ids that another server made, as in vLLM. The answer comes as a whole or as a stream."""
    asked = call.body.asked()
    shape = replace(shape_of(asked, call.service), return_token_ids=True, tokens_as_ids=True)
    return await _GenerateRun(call.service, asked, shape, call.arrival, given=call.body).respond(call.request)


@dataclass(slots=True)
class _GenerateRun(TextRun):
    id_prefix = "generate-"
    body: GenerationBody
    given: GenerateRequest = field(kw_only=True)

    def size(self) -> tuple[int, int]:
        return 1, estimate_size([self.given.token_ids], self.service.client.info.max_model_len)

    async def prompts(self) -> list[Prompt]:
        prompts = await encode_prompts(self.service, [self.given.token_ids], "token_ids", truncation=self.truncation)
        self.fill_room(len(prompts[0].token_ids))
        return prompts

    def whole(self, choices: list[CompletionChoice], usage: Usage) -> BaseModel:
        return self._chunk(choices, {"usage": usage})

    def events(self, maker: PieceMaker[CompletionChoice]) -> ChunkEvents[CompletionChoice]:
        return ChunkEvents(maker, self._chunk, self.body.stream_options)

    def _chunk(self, pieces: Sequence[CompletionChoice], extra: Extra) -> GenerateResponse:
        told: dict[str, Any] = {"usage": extra["usage"]} if "usage" in extra else {}
        first = next((piece.prompt_token_ids for piece in pieces if piece.prompt_token_ids is not None), None)
        if self.given.return_token_ids and first is not None:
            told["prompt_token_ids"] = first
        logprobs = next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None)
        if logprobs is not None:
            told["prompt_logprobs"] = logprobs
        return GenerateResponse(
            request_id=self.given.request_id or self.request_id,
            model=self.service.name_of(self.terms),
            created=self.created,
            output_mode=self.given.output_mode or "tokens",
            choices=[self._choice(piece) for piece in pieces],
            **told,
        )

    def _choice(self, piece: CompletionChoice) -> GenerateChoice:
        text = {"text": piece.text} if self.given.output_mode == "text" else {}
        return GenerateChoice(
            index=piece.index,
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids or [],
            logprobs=_logprobs(piece),
            **text,
        )

    def ignored_fields(self) -> list[str]:
        return self.given.ignored_fields()

    def public_name(self, param: str | None) -> str | None:
        if param in (None, "prompt", "token_ids"):
            return param and "token_ids"
        return f"sampling_params.{param}"


def _logprobs(piece: CompletionChoice) -> TokenLogprobs | None:
    if piece.logprobs is None:
        return None
    found = piece.logprobs
    return TokenLogprobs(
        content=[
            TokenLogprobContent(
                **_token(name, value or 0.0).model_dump(), top_logprobs=[_token(*pair) for pair in (top or {}).items()]
            )
            for name, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
        ]
    )


def _token(name: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(token_id=int(name.removeprefix("token_id:")), logprob=logprob)
