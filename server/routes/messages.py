"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Response

from server.answering.conversation import render_chat
from server.answering.endpoints import lacks_chat
from server.answering.message_events import MessageRun, in_anthropics_words
from server.answering.message_input import NAMES, read_chat, read_prompt
from server.answering.public_names import public_names
from server.answering.reading import Ignored
from server.api import examples
from server.api.fields import ignored_header
from server.api.message_schemas import CountTokensRequest, MessageError, MessageObject, MessageRequest, TokenCount
from server.api.reading import StrictJsonRoute
from server.context import Service, ServiceDep
from server.door.message_errors import MESSAGES_PATH
from server.routes.task_router import TaskCall, TaskRouter

router = TaskRouter("generating", one_text=True)
counting = APIRouter(route_class=StrictJsonRoute)

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessageError, "description": "Client error."},
    "5XX": {"model": MessageError, "description": "Server error."},
}


@router.endpoint(
    MESSAGES_PATH,
    response_model=MessageObject,
    examples=examples.MESSAGES,
    events=examples.MESSAGE_STREAM,
    errors=ERRORS,
    lacks=lacks_chat,
    refuses=False,  # `read_chat` refuses unsupported fields
    summary="Create a message",
)
async def create_message(call: TaskCall[MessageRequest]) -> Response:
    """Generate the assistant's next message, as in Anthropic's Messages API. The answer comes as a whole or as a
    stream."""
    return await run_of(call.body, call.service, call.arrival).respond(call.request)


def run_of(body: MessageRequest, service: Service, arrival: float) -> MessageRun:
    """The run that answers a request. Raises ApiError, InvalidRequestError if the body contains an invalid or
    unsupported field."""
    service.check_model(body.model)
    service.require(MESSAGES_PATH)
    ignored = Ignored(sees=service.sees)
    chat = read_chat(body, ignored)
    with public_names(NAMES):
        return MessageRun.of(chat, service, arrival, ignored=ignored)


@counting.post(f"{MESSAGES_PATH}/count_tokens", responses=ERRORS, summary="Count the tokens of messages")
async def count_tokens(
    body: Annotated[CountTokensRequest, Body(openapi_examples=examples.COUNT_TOKENS)],
    response: Response,
    service: ServiceDep,
) -> TokenCount:
    """Count the prompt tokens that /v1/messages would use for these messages."""
    service.check_model(body.model)
    service.require(MESSAGES_PATH)
    ignored = Ignored(sees=service.sees)
    chat = read_prompt(body, ignored)
    response.headers.update(ignored_header(ignored))
    with public_names(NAMES), in_anthropics_words(service.client.info.max_model_len):
        prompt = await render_chat(service, chat)
    return TokenCount(input_tokens=prompt.num_tokens)
