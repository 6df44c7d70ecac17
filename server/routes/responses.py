"""POST /v1/responses, and its stored answers."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body, Path, Query, Request, Response
from pydantic_core import to_json

from engine import parse_bytes
from server.answering.background import follow
from server.answering.conversation import render_chat
from server.answering.endpoints import lacks_chat
from server.answering.keeping import asked, store_of, tenant_of
from server.answering.public_names import public_names
from server.answering.reading import Ignored, fail
from server.answering.response_input import Item, read_items
from server.answering.response_tools import ResponseTools
from server.answering.responses import NAMES, ResponseRun, conversation_id, read_chat
from server.answering.streaming import EventStream, Wanted
from server.api import examples
from server.api.chat_schemas import ChatCompletionRequest
from server.api.fields import ignored_header
from server.api.paging import After, Limit, Order
from server.api.reading import StrictJsonRoute
from server.api.response_schemas import InputTokens, ItemList, ResponseDeleted, ResponseObject, ResponseRequest
from server.api.schemas import MAX_MESSAGES
from server.context import HouseDep, Service, ServiceDep
from server.conversation_store import ConversationTooLargeError
from server.errors import ApiError, shown
from server.response_store import HistoryError, Kept
from server.routes.task_router import TaskCall, TaskRouter

router = TaskRouter("generating", one_text=True)
counting = APIRouter(route_class=StrictJsonRoute)
stored = APIRouter()

_ENDPOINT = "/v1/responses"
MAX_EVENT = 2**31 - 1  # number of an event

ResponseId = Annotated[str, Path(max_length=256)]


@router.endpoint(
    _ENDPOINT,
    response_model=ResponseObject,
    examples=examples.RESPONSES,
    events=examples.RESPONSE_STREAM,
    lacks=lacks_chat,
    refuses=False,  # `read_chat` refuses unsupported fields
    summary="Create a response",
)
async def create_response(call: TaskCall[ResponseRequest]) -> Response:
    """Generate the next items of a conversation, as in OpenAI's Responses API. The answer comes as a whole or as a
    stream of typed events."""
    run = await run_of(call.body, call.request, call.service, call.arrival)
    return await run.respond(call.request)


async def run_of(body: ResponseRequest, request: Request, service: Service, arrival: float) -> ResponseRun:
    """The run that answers a request. Raises ApiError, InvalidRequestError if the body contains an invalid or
    unsupported field."""
    ignored = Ignored(sees=service.sees)
    items, chat, tools = await _read(body, request, service, ignored)
    with public_names(NAMES):
        return ResponseRun.of(chat, service, arrival, asked=body, items=items, called=tools, ignored=ignored)


@counting.post(f"{_ENDPOINT}/input_tokens", summary="Count the tokens of an input")
async def count_input_tokens(
    body: Annotated[ResponseRequest, Body(openapi_examples=examples.RESPONSES)],
    request: Request,
    response: Response,
    service: ServiceDep,
) -> InputTokens:
    """Count the tokens of the prompt that /v1/responses makes of the same body."""
    ignored = Ignored(sees=service.sees)
    _, chat, _ = await _read(body, request, service, ignored)
    response.headers.update(ignored_header(ignored))
    with public_names(NAMES):
        return InputTokens(input_tokens=(await render_chat(service, chat)).num_tokens)


@stored.post(f"{_ENDPOINT}/compact", include_in_schema=False)
async def compact() -> None:
    """Refuse compaction; without this route, POST /v1/responses/{response_id} would refuse it as a wrong method."""
    message = (
        "This server does not compact conversations. Ask the model for a summary, or send truncation: auto with "
        "/v1/responses."
    )
    raise ApiError(404, message, code="unsupported_endpoint")


async def _read(
    body: ResponseRequest, request: Request, service: Service, ignored: Ignored
) -> tuple[list[Item], ChatCompletionRequest, ResponseTools]:
    service.check_model(body.model)
    service.require(_ENDPOINT)
    history: list[Item] = []
    if body.previous_response_id is not None:
        if body.conversation is not None:
            fail(
                "conversation", "conversation cannot be sent with previous_response_id: each sets the earlier messages."
            )
        history = await _history(service, body.previous_response_id, tenant_of(request))
    elif body.conversation is not None:
        history = await _conversation(service, conversation_id(body.conversation), tenant_of(request))
    items = [] if body.input is None and history else read_items(body.input, ignored)
    return items, *read_chat(body, [*history, *items], ignored)


@stored.get(
    f"{_ENDPOINT}/{{response_id}}",
    response_model=ResponseObject,
    responses={200: {"content": examples.RESPONSE_STREAM}},
    summary="Get a stored response",
)
async def get_response(
    response_id: ResponseId,
    request: Request,
    service: HouseDep,
    stream: Annotated[bool, Query(description="The events of an answer that was made in the background.")] = False,
    starting_after: Annotated[
        int, Query(ge=-1, le=MAX_EVENT, description="With stream: start after the event with this number.")
    ] = -1,
) -> Response:
    """Return a stored response, or the stream of a background response from any event on."""
    tenant = tenant_of(request)
    kept = await _kept(service, response_id, tenant)
    if not stream:
        return Response(await asyncio.to_thread(kept.whole), media_type="application/json")
    store = service.response_store
    assert store is not None
    if await asked(service, store.events(response_id, tenant, starting_after)) is None:
        message = (
            f"{shown(response_id)} has no stream to resume. Only responses made with background and stream have one."
        )
        raise ApiError(400, message, param="stream", code="invalid_value")
    events = follow(service, response_id, tenant, starting_after)
    return EventStream(events, Wanted(service.drain, lambda reason: None))


@stored.delete(f"{_ENDPOINT}/{{response_id}}", summary="Delete a stored response")
async def delete_response(response_id: ResponseId, request: Request, service: HouseDep) -> ResponseDeleted:
    """Delete a response with its input. Responses that continue it can no longer be continued."""
    store, tenant = service.response_store, tenant_of(request)
    if not (await _kept(service, response_id, tenant)).ended:
        await _cancelled(service, response_id, tenant)
    if store is None or not await asked(service, store.delete(response_id, tenant)):
        raise _unknown(service, response_id)
    return ResponseDeleted(id=response_id)


@stored.post(
    f"{_ENDPOINT}/{{response_id}}/cancel",
    response_model=ResponseObject,
    summary="Cancel a response",
)
async def cancel_response(response_id: ResponseId, request: Request, service: HouseDep) -> Response:
    """Stop a response that is still being generated. The result and the stream end with the text so far. A background
    response that has ended is returned as it is."""
    cancelled = await _cancelled(service, response_id, tenant_of(request))
    if cancelled is not None:
        return Response(to_json(cancelled), media_type="application/json")
    kept = await _kept(service, response_id, tenant_of(request))
    if kept.background:
        return Response(await asyncio.to_thread(kept.whole), media_type="application/json")
    message = f"{shown(response_id)} cannot be cancelled: it has ended."
    raise ApiError(400, message, param="response_id", code="invalid_value")


@stored.get(f"{_ENDPOINT}/{{response_id}}/input_items", summary="List the input of a stored response")
async def list_input_items(
    response_id: ResponseId,
    request: Request,
    service: HouseDep,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> ItemList:
    """List the input items of a response's request. The items of earlier turns are listed with their own responses."""
    kept = await _kept(service, response_id, tenant_of(request))
    items = await asyncio.to_thread(kept.items)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            message = f"after must be the id of one of the response's input items, got {shown(after)}."
            raise ApiError(400, message, param="after", code="invalid_value")
        items = items[places[0] + 1 :]
    return ItemList.of(items[:limit], more=len(items) > limit)


async def _cancelled(service: Service, id_: str, tenant: str | None) -> dict[str, Any] | None:
    """An answer that was being generated, now ended; None if there is none."""
    running = service.running_responses.get(id_)
    if running is not None and running.terms.tenant == tenant:
        return running.cancel()
    return await service.commons.cancel(id_, tenant)


async def _history(service: Service, id_: str, tenant: str | None) -> list[Item]:
    name = "previous_response_id"
    store = store_of(service, name)
    most = parse_bytes(service.settings.max_body_size, "max_body_size")
    try:
        return await asked(service, store.history(id_, tenant, most))
    except HistoryError as problem:
        message = f"{name} {shown(id_)} cannot be continued: {problem}."
        if problem.missing is None:
            message += " Send the needed parts of it as input."
            raise ApiError(400, message, param=name, code="context_length_exceeded") from None
        code = "response_not_completed" if problem.running else "previous_response_not_found"
        raise ApiError(400, message, param=name, code=code) from None


async def _conversation(service: Service, id_: str, tenant: str | None) -> list[Item]:
    conversations = store_of(service, "conversation").conversations
    most = parse_bytes(service.settings.max_body_size, "max_body_size")
    try:
        items = await asked(service, conversations.history(id_, tenant, MAX_MESSAGES, most))
    except ConversationTooLargeError as problem:
        message = f"conversation {shown(id_)} cannot be continued: {problem}. Delete items, or start another."
        fail("conversation", message, code="context_length_exceeded")
    if items is None:
        raise ApiError(404, f"There is no conversation {shown(id_)}.", param="conversation", code="not_found")
    return items


async def _kept(service: Service, id_: str, tenant: str | None) -> Kept:
    store = service.response_store
    kept = None if store is None else await asked(service, store.get(id_, tenant))
    if kept is None:
        raise _unknown(service, id_)
    return kept


def _unknown(service: Service, id_: str) -> ApiError:
    why = (
        ""
        if service.response_store is not None
        else " This server does not store responses (--response-store is not set)."
    )
    return ApiError(404, f"There is no response {shown(id_)}.{why}", param="response_id", code="not_found")
