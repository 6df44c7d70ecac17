"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import Response

from server.answering.chat import join_pieces
from server.answering.conversation import ConversationRun
from server.answering.endpoints import lacks_chat
from server.answering.events import ChunkEvents, Extra
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
from server.api.schemas import Usage
from server.routes.task_router import TaskCall, TaskRouter

router = TaskRouter("generating", one_text=True)


@router.endpoint(
    "/v1/chat/completions",
    "/chat/completions",
    response_model=ChatCompletionResponse,
    examples=examples.CHAT,
    events=examples.EVENT_STREAM,
    lacks=lacks_chat,
    refuses=False,  # `shape_of` refuses unsupported fields
    summary="Create a chat completion",
)
async def create_chat_completion(call: TaskCall[ChatCompletionRequest]) -> Response:
    """Generate the assistant's next message in a conversation. The answer comes as a whole or as a stream."""
    return await ChatRun.of(call.body, call.service, call.arrival).respond(call.request)


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

    def events(self, maker: PieceMaker[ChatPiece]) -> ChunkEvents[ChatPiece]:
        return ChunkEvents(maker, self._chunk, self.body.stream_options)

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
