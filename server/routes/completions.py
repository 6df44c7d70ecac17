"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response

from engine import SamplingParams
from server.completion import PieceMaker, Shape, join, keep_best
from server.context import Service, ServiceDep
from server.errors import ERROR_RESPONSES, ApiError
from server.generation import Prompt, Update, run_prompts
from server.schemas import CompletionChoice, CompletionRequest, CompletionResponse, StrictJsonRoute, Usage
from server.streaming import ClientGoneError, EventStream, run_while_connected, sse

router = APIRouter(route_class=StrictJsonRoute)

_SENDABLE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_IGNORED_NAMES_SHOWN = 32
_STREAM_DOC = {"text/event-stream": {"schema": {"type": "string"}}}


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses={200: {"content": _STREAM_DOC}, **ERROR_RESPONSES},
    summary="Continue a prompt",
)
async def create_completion(body: CompletionRequest, request: Request, service: ServiceDep) -> Response:
    """Continue one prompt or several, at once or as a stream."""
    arrival = time.perf_counter()
    service.check_model(body.model)
    shape = _shape(body)
    headers = _ignored_header(body)
    run = _CompletionRun(service, body, shape, f"cmpl-{uuid.uuid4().hex}", arrival)
    if body.stream:
        return EventStream(run.events(), headers)
    try:
        answer = await run_while_connected(request.receive, run.answer())
    except ClientGoneError:
        return Response(status_code=499)  # nobody will read it
    return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json", headers=headers)


def _shape(body: CompletionRequest) -> Shape:
    """What the body asks of the engine, and of the answer.

    Raises:
        ApiError, InvalidRequestError: fields that contradict each other or are out of range.
    """
    if body.suffix is not None:
        raise ApiError(400, "suffix is not supported; leave it out.", param="suffix", code="unsupported_parameter")
    if body.stream_options is not None and not body.stream:
        message = "stream_options is only allowed when stream is true."
        raise ApiError(400, message, param="stream_options", code="invalid_value")
    fields = body.sampling()
    asked = SamplingParams(**fields)  # also checks what was given, before anything is computed with it
    best_of = body.best_of if body.best_of is not None else asked.n
    if best_of < asked.n:
        message = f"best_of ({best_of}) must be at least n ({asked.n})."
        raise ApiError(400, message, param="best_of", code="invalid_value")
    if body.use_beam_search:
        fields["num_beams"] = max(asked.num_beams or 0, best_of, 2)
    elif (asked.num_beams or 1) > 1:
        fields["num_beams"] = max(asked.num_beams or 0, best_of)
    elif best_of > asked.n:
        if body.stream:
            message = f"best_of ({best_of}) above n ({asked.n}) cannot be streamed: the best are known at the end."
            raise ApiError(400, message, param="best_of", code="invalid_value")
        fields["n"] = best_of
        fields["logprobs"] = asked.logprobs or 0  # what the choice among them goes by
    if body.echo and asked.logprobs is not None:
        fields["prompt_logprobs"] = max(asked.prompt_logprobs or 0, asked.logprobs)
    return Shape(
        params=SamplingParams(**fields),
        n=asked.n,
        logprobs=asked.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        echo=bool(body.echo),
        return_token_ids=bool(body.return_token_ids),
    )


def _ignored_header(body: CompletionRequest) -> dict[str, str]:
    names = [name for name in body.ignored_fields() if _SENDABLE_NAME.fullmatch(name)]
    return {"X-Octavo-Ignored-Fields": ", ".join(names[:_IGNORED_NAMES_SHOWN])} if names else {}


@dataclass(slots=True)
class _CompletionRun:
    """One request being answered."""

    service: Service
    body: CompletionRequest
    shape: Shape
    request_id: str
    arrival: float
    created: int = field(default_factory=lambda: int(time.time()))

    async def answer(self) -> CompletionResponse:
        """The whole answer."""
        prompts = await self._prompts()
        maker = PieceMaker(prompts, self.shape, self.service.tokenizer)
        pieces: list[CompletionChoice] = []
        width = self.shape.params.n
        scores = [float("-inf")] * (width * len(prompts))
        async with aclosing(self._updates(prompts)) as updates:
            async for update in updates:
                pieces += maker.pieces(update)
                for choice in update.choices:
                    if choice.cumulative_logprob is not None:
                        scores[update.prompt_index * width + choice.index] = choice.cumulative_logprob
        choices = join(pieces)
        if width > self.shape.n:
            choices = keep_best(choices, scores, width, self.shape.n)
        return self._response(choices, {"usage": maker.usage()})

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as events, one choice each."""
        prompts = await self._prompts()
        maker = PieceMaker(prompts, self.shape, self.service.tokenizer)
        options = self.body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        async with aclosing(self._updates(prompts)) as updates:
            async for update in updates:
                for piece in maker.pieces(update):
                    yield self._event([piece], {"usage": None} if with_usage else {})
        if with_usage:
            yield self._event([], {"usage": maker.usage()})
        yield sse("[DONE]")

    def _updates(self, prompts: list[Prompt]) -> AsyncGenerator[Update, None]:
        return run_prompts(self.service, self.request_id, prompts, self.shape.params, self.arrival)

    def _event(self, choices: list[CompletionChoice], usage: dict[str, Usage | None]) -> str:
        return sse(self._response(choices, usage).model_dump_json(exclude_unset=True))

    def _response(self, choices: list[CompletionChoice], usage: dict[str, Usage | None]) -> CompletionResponse:
        # Where `usage` is empty the field is left out altogether, as OpenAI does.
        return CompletionResponse(
            id=self.request_id,
            object="text_completion",
            created=self.created,
            model=self.service.model_id,
            choices=choices,
            **usage,
        )

    async def _prompts(self) -> list[Prompt]:
        """The body's prompts as token ids; texts are tokenised in a thread."""
        tokenizer, vocab_size = self.service.tokenizer, self.service.client.info.vocab_size
        given = self.body.prompt
        for prompt in given:
            if isinstance(prompt, str):
                if tokenizer is None:
                    message = f"{self.service.model_id} has no tokenizer: send the prompt as token ids."
                    raise ApiError(400, message, param="prompt", code="no_tokenizer")
            elif not 0 <= min(prompt) <= max(prompt) < vocab_size:
                wrong = min(prompt) if min(prompt) < 0 else max(prompt)
                message = f"prompt: token ids must be from 0 to {vocab_size - 1}, got {wrong}."
                raise ApiError(400, message, param="prompt", code="invalid_value")
        if tokenizer is None:
            return [Prompt(prompt) for prompt in given]
        encode = tokenizer.encode
        return await asyncio.to_thread(
            lambda: [Prompt(encode(item), item) if isinstance(item, str) else Prompt(item) for item in given]
        )
