"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from server.answering.chat import join_pieces
from server.answering.conversation import ConversationRun
from server.answering.endpoints import require
from server.answering.events import Chunks, Extra
from server.answering.pieces import PieceMaker
from server.api import examples
from server.api.chat_schemas import (
    ChatChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatPiece,
    PromptFields,
)
from server.api.reading import StrictJsonRoute
from server.api.schemas import Usage
from server.context import ServiceDep
from server.errors import ERROR_RESPONSES

router = APIRouter(route_class=StrictJsonRoute)


@router.post("/chat/completions", include_in_schema=False)
@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletionResponse,
    responses={200: {"content": examples.EVENT_STREAM}, **ERROR_RESPONSES},
    summary="Create a chat completion",
)
async def create_chat_completion(
    body: Annotated[ChatCompletionRequest, Body(openapi_examples=examples.CHAT)], request: Request, service: ServiceDep
) -> Response:
    """Generate the assistant's next message in a conversation. The answer comes as a whole or as a stream."""
    arrival = time.monotonic()
    service.check_model(body.model)
    require(service, "/v1/chat/completions")
    return await ChatRun.of(body, service, arrival).respond(request)


@dataclass(slots=True)
class ChatRun(ConversationRun[ChatChoice]):
    """A conversation answered in OpenAI's shape."""

    id_prefix = "chatcmpl-"
    told: PromptFields = field(default_factory=PromptFields)  # tokens of the prompt

    def join(self, pieces: list[ChatPiece]) -> list[ChatChoice]:
        self.told = pieces[0].prompt
        return join_pieces(pieces, logprobs=self.shape.logprobs is not None)

    def whole(self, choices: list[ChatChoice], usage: Usage) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            id=self.request_id,
            object="chat.completion",
            created=self.created,
            model=self.service.name_of(self.terms),
            choices=choices,
            system_fingerprint=self.service.fingerprint,
            usage=usage,
            prompt_logprobs=self.told.prompt_logprobs,
            prompt_token_ids=self.told.prompt_token_ids,
            **self.timed(choices),
        )

    def events(self, maker: PieceMaker[ChatPiece]) -> Chunks[ChatPiece]:
        return Chunks(maker, self._chunk, self.body.stream_options)

    def _chunk(self, pieces: list[ChatPiece], extra: Extra) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.request_id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.service.name_of(self.terms),
            choices=pieces,
            system_fingerprint=self.service.fingerprint,
            **extra,
            **self.timed(pieces),
            **(pieces[0].prompt.model_dump(exclude_unset=True) if pieces else {}),
        )
