"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from server.answering.endpoints import require
from server.answering.message_events import MessageRun, in_anthropics_words
from server.answering.message_input import NAMES, read_chat, read_prompt
from server.answering.messages import estimate_messages, read_messages
from server.answering.prompt import Room
from server.answering.public_names import public_names
from server.answering.reading import Ignored
from server.answering.rendering import read_rendering
from server.answering.tools import read_tools
from server.api import examples
from server.api.fields import ignored_header
from server.api.message_schemas import CountTokensRequest, MessageError, MessageObject, MessageRequest, TokenCount
from server.api.reading import StrictJsonRoute
from server.context import ServiceDep
from server.door.message_errors import MESSAGES_PATH

router = APIRouter(route_class=StrictJsonRoute)
counting = APIRouter(route_class=StrictJsonRoute)

_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessageError, "description": "Client error."},
    "5XX": {"model": MessageError, "description": "Server error."},
}


@router.post(
    MESSAGES_PATH,
    response_model=MessageObject,
    responses={200: {"content": examples.MESSAGE_STREAM}, **_ERRORS},
    summary="Create a message",
)
async def create_message(
    body: Annotated[MessageRequest, Body(openapi_examples=examples.MESSAGES)], request: Request, service: ServiceDep
) -> Response:
    """Generate the assistant's next message, as in Anthropic's Messages API. The answer comes as a whole or as a
    stream."""
    arrival = time.monotonic()
    service.check_model(body.model)
    require(service, MESSAGES_PATH)
    ignored: Ignored = set()
    chat = read_chat(body, ignored)
    with public_names(NAMES):
        run = MessageRun.of(chat, service, arrival, ignored=ignored)
    return await run.respond(request)


@counting.post(f"{MESSAGES_PATH}/count_tokens", responses=_ERRORS, summary="Count the tokens of messages")
async def count_tokens(
    body: Annotated[CountTokensRequest, Body(openapi_examples=examples.COUNT_TOKENS)],
    response: Response,
    service: ServiceDep,
) -> TokenCount:
    """Count the prompt tokens that /v1/messages would use for these messages."""
    service.check_model(body.model)
    require(service, MESSAGES_PATH)
    ignored: Ignored = set()
    chat = read_prompt(body, ignored)
    response.headers.update(ignored_header(ignored))
    with public_names(NAMES):
        messages = read_messages(chat.messages)
        rendering = read_rendering(chat, read_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls))
        with await service.tokenizing.admit(1, estimate_messages(messages) + rendering.num_tokens):
            room = Room(service.client.info.max_model_len, "messages")
            with in_anthropics_words(room.tokens):
                prompt = await service.render(messages, room, rendering)
    return TokenCount(input_tokens=len(prompt.token_ids))
