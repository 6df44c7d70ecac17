"""POST /v1/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from server.answering.answer import Run, encode_prompts, estimate_size
from server.answering.completion import CompletionPieces, join
from server.answering.prompt import Prompt
from server.api import examples
from server.api.parameters import shape_of
from server.api.schemas import CompletionChoice, CompletionRequest, CompletionResponse, StrictJsonRoute, Usage
from server.context import ServiceDep
from server.errors import ERROR_RESPONSES, ApiError

router = APIRouter(route_class=StrictJsonRoute)


@router.post(
    "/v1/completions",
    response_model=CompletionResponse,
    responses={200: {"content": examples.EVENT_STREAM}, **ERROR_RESPONSES},
    summary="Continue a prompt",
)
async def create_completion(
    body: Annotated[CompletionRequest, Body(openapi_examples=examples.COMPLETIONS)],
    request: Request,
    service: ServiceDep,
) -> Response:
    """Continue one prompt or several, at once or as a stream."""
    arrival = time.monotonic()
    service.check_model(body.model)
    if body.suffix:
        raise ApiError(400, "suffix is not supported; leave it out.", param="suffix", code="unsupported_parameter")
    shape = shape_of(body, service, echo=bool(body.echo))
    return await _CompletionRun(service, body, shape, arrival).respond(request)


@dataclass(slots=True)
class _CompletionRun(Run[CompletionChoice, CompletionChoice]):
    id_prefix = "cmpl"
    body: CompletionRequest

    def size(self) -> tuple[int, int]:
        return len(self.body.prompt), estimate_size(self.body.prompt, self.service.client.info.max_model_len)

    async def prompts(self) -> list[Prompt]:
        special = self.body.add_special_tokens is not False
        return await encode_prompts(self.service, self.body.prompt, add_special_tokens=special)

    def maker(self, prompts: list[Prompt]) -> CompletionPieces:
        return CompletionPieces(prompts, self.shape, self.service.tokenizer)

    def join(self, pieces: list[CompletionChoice]) -> list[CompletionChoice]:
        return join(pieces)

    def whole(self, choices: list[CompletionChoice], usage: Usage) -> CompletionResponse:
        return self.chunk(choices, {"usage": usage})

    def chunk(self, pieces: list[CompletionChoice], usage: dict[str, Usage | None]) -> CompletionResponse:
        return CompletionResponse(
            id=self.request_id,
            object="text_completion",
            created=self.created,
            model=self.service.model_id,
            choices=pieces,
            **usage,
        )
