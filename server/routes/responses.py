"""POST /v1/responses, and its stored answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Annotated, TypeVar

from fastapi import APIRouter, Body, Path, Query, Request, Response
from pydantic_core import to_json

from engine import parse_bytes
from server.answering.endpoints import require
from server.answering.public_names import public_names
from server.answering.reading import Ignored
from server.answering.response_input import Item, read_items
from server.answering.responses import NAMES, ResponseRun, read_chat
from server.api import examples
from server.api.reading import StrictJsonRoute
from server.api.response_schemas import ItemList, ResponseDeleted, ResponseObject, ResponseRequest
from server.context import Service, ServiceDep
from server.errors import ERROR_RESPONSES, ApiError, shown
from server.response_store import HistoryError, Kept, StoreError

logger = logging.getLogger("octavo.server")

T = TypeVar("T")

router = APIRouter(route_class=StrictJsonRoute)
stored = APIRouter()

_ENDPOINT = "/v1/responses"
MAX_LISTED = 100  # items of a page, as at OpenAI

ResponseId = Annotated[str, Path(max_length=256)]


@router.post(
    _ENDPOINT,
    response_model=ResponseObject,
    responses={200: {"content": examples.RESPONSE_STREAM}, **ERROR_RESPONSES},
    summary="Create a response",
)
async def create_response(
    body: Annotated[ResponseRequest, Body(openapi_examples=examples.RESPONSES)], request: Request, service: ServiceDep
) -> Response:
    """Generate the next items of a conversation, as in OpenAI's Responses API. The answer comes as a whole or as a
    stream of typed events."""
    arrival = time.monotonic()
    service.check_model(body.model)
    require(service, _ENDPOINT)
    ignored: Ignored = set()
    items = read_items(body.input, ignored)
    history: list[Item] = []
    if body.previous_response_id is not None:
        history = await _history(service, body.previous_response_id, _tenant(request))
    chat, tools = read_chat(body, [*history, *items], ignored)
    with public_names(NAMES):
        run = ResponseRun.of(chat, service, arrival, asked=body, items=items, called=tools, ignored=ignored)
    return await run.respond(request)


@stored.get(
    f"{_ENDPOINT}/{{response_id}}",
    response_model=ResponseObject,
    responses=ERROR_RESPONSES,
    summary="Get a stored response",
)
async def get_response(
    response_id: ResponseId,
    request: Request,
    service: ServiceDep,
    stream: Annotated[bool, Query(description="false; true is not supported.")] = False,
) -> Response:
    """Return a stored response as it was sent."""
    if stream:
        message = "stream is not supported for stored responses."
        raise ApiError(400, message, param="stream", code="unsupported_parameter")
    kept = await _kept(service, response_id, _tenant(request))
    return Response(await asyncio.to_thread(kept.whole), media_type="application/json")


@stored.delete(f"{_ENDPOINT}/{{response_id}}", responses=ERROR_RESPONSES, summary="Delete a stored response")
async def delete_response(response_id: ResponseId, request: Request, service: ServiceDep) -> ResponseDeleted:
    """Delete a response with its input. Responses that continue it can no longer be continued."""
    store = service.response_store
    if store is None or not await _asked(service, store.delete(response_id, _tenant(request))):
        raise _unknown(service, response_id)
    return ResponseDeleted(id=response_id)


@stored.post(
    f"{_ENDPOINT}/{{response_id}}/cancel",
    response_model=ResponseObject,
    responses=ERROR_RESPONSES,
    summary="Cancel a streamed response",
)
async def cancel_response(response_id: ResponseId, request: Request, service: ServiceDep) -> Response:
    """Stop a response that is still being generated. The result and the stream end with the text so far."""
    running = service.running_responses.get(response_id)
    if running is not None and running.terms.tenant == _tenant(request):
        return Response(to_json(running.cancel()), media_type="application/json")
    cancelled = await service.commons.cancel(response_id, _tenant(request))
    if cancelled is not None:
        return Response(to_json(cancelled), media_type="application/json")
    await _kept(service, response_id, _tenant(request))
    message = f"{shown(response_id)} cannot be cancelled: it has ended."
    raise ApiError(400, message, param="response_id", code="invalid_value")


@stored.get(
    f"{_ENDPOINT}/{{response_id}}/input_items", responses=ERROR_RESPONSES, summary="List the input of a stored response"
)
async def list_input_items(
    response_id: ResponseId,
    request: Request,
    service: ServiceDep,
    after: Annotated[str | None, Query(max_length=256, description="Start after the item with this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    order: Annotated[str, Query(pattern="^(asc|desc)$", description="asc or desc (default)")] = "desc",
) -> ItemList:
    """List the input items of a response's request. The items of earlier turns are listed with their own responses."""
    kept = await _kept(service, response_id, _tenant(request))
    items = await asyncio.to_thread(kept.items)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            message = f"after must be the id of one of the response's input items, got {shown(after)}."
            raise ApiError(400, message, param="after", code="invalid_value")
        items = items[places[0] + 1 :]
    page = items[:limit]
    return ItemList(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > limit,
    )


def _tenant(request: Request) -> str | None:
    return getattr(request.state, "tenant", None)


async def _history(service: Service, id_: str, tenant: str | None) -> list[Item]:
    store, name = service.response_store, "previous_response_id"
    if store is None:
        message = (
            f"{name} needs stored responses, but this server does not store them. Send the whole conversation "
            f"as input, or start the server with --response-store."
        )
        raise ApiError(400, message, param=name, code="unsupported_parameter")
    most = parse_bytes(service.settings.max_body_size, "max_body_size")
    try:
        return await _asked(service, store.history(id_, tenant, most))
    except HistoryError as problem:
        message = f"{name} {shown(id_)} cannot be continued: {problem}."
        if problem.missing is None:
            message += " Send what is needed of it as input."
            raise ApiError(400, message, param=name, code="context_length_exceeded") from None
        raise ApiError(400, message, param=name, code="previous_response_not_found") from None


async def _kept(service: Service, id_: str, tenant: str | None) -> Kept:
    store = service.response_store
    kept = None if store is None else await _asked(service, store.get(id_, tenant))
    if kept is None:
        raise _unknown(service, id_)
    return kept


async def _asked(service: Service, answer: Awaitable[T]) -> T:
    """What the store says.

    Raises:
        ApiError: 500, it failed.
    """
    try:
        return await answer
    except StoreError as problem:
        service.metrics.store_failed()
        logger.error("The response store failed: %s", problem)
        message = "The response store failed. See the server's log for the reason."
        raise ApiError(500, message, code="internal_error") from problem


def _unknown(service: Service, id_: str) -> ApiError:
    why = (
        ""
        if service.response_store is not None
        else " This server does not store responses (--response-store is not set)."
    )
    return ApiError(404, f"There is no response {shown(id_)}.{why}", param="response_id", code="not_found")
