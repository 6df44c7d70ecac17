"""/v1/conversations: conversations stored on the server."""

from __future__ import annotations

from typing import Annotated, NoReturn

from fastapi import APIRouter, Body, Depends, Path, Request, Response

from engine import parse_bytes
from server.answering.keeping import asked, store_of, tenant_of
from server.answering.reading import Ignored, fail
from server.answering.response_input import Item, read_items
from server.api import examples
from server.api.fields import ignored_header
from server.api.paging import After, Limit, Order
from server.api.reading import StrictJsonRoute
from server.api.response_schemas import (
    ConversationDeleted,
    ConversationFields,
    ConversationObject,
    ConversationUpdate,
    ItemList,
    NewItems,
)
from server.api.schemas import MAX_MESSAGES
from server.context import HouseDep, Service
from server.conversation_store import Conversations, ConversationTooLargeError, StoredConversation
from server.errors import ApiError, shown

router = APIRouter(route_class=StrictJsonRoute)  # with bodies
plain = APIRouter()

_ENDPOINT = "/v1/conversations"
_ITEMS = f"{_ENDPOINT}/{{conversation_id}}/items"

Id = Annotated[str, Path(max_length=256)]
ItemId = Annotated[str, Path(max_length=256)]


async def _conversations(service: HouseDep) -> Conversations:
    return store_of(service, "conversations").conversations


ConversationsDep = Annotated[Conversations, Depends(_conversations)]


@router.post(_ENDPOINT, summary="Begin a conversation")
async def create_conversation(
    body: Annotated[ConversationFields, Body(openapi_examples=examples.CONVERSATION)],
    request: Request,
    response: Response,
    service: HouseDep,
    conversations: ConversationsDep,
) -> ConversationObject:
    """Create a conversation, optionally with its first items."""
    items = _read(body, response, service)
    try:
        created = conversations.create(tenant_of(request), body.metadata or {}, items, _max_size(service))
        return _shown(await asked(service, created))
    except ConversationTooLargeError as problem:
        _too_large(problem)


@plain.get(f"{_ENDPOINT}/{{conversation_id}}", summary="Show a conversation")
async def get_conversation(
    conversation_id: Id, request: Request, service: HouseDep, conversations: ConversationsDep
) -> ConversationObject:
    """Show a conversation without its items."""
    found = await asked(service, conversations.get(conversation_id, tenant_of(request)))
    return _shown(found or _missing(conversation_id))


@router.post(f"{_ENDPOINT}/{{conversation_id}}", summary="Change a conversation's metadata")
async def update_conversation(
    conversation_id: Id,
    body: Annotated[ConversationUpdate, Body(openapi_examples=examples.CONVERSATION_UPDATE)],
    request: Request,
    response: Response,
    service: HouseDep,
    conversations: ConversationsDep,
) -> ConversationObject:
    """Replace the metadata of a conversation."""
    response.headers.update(ignored_header(body.ignored_fields()))
    changed = await asked(service, conversations.update(conversation_id, tenant_of(request), body.metadata or {}))
    return _shown(changed or _missing(conversation_id))


@plain.delete(f"{_ENDPOINT}/{{conversation_id}}", summary="Delete a conversation")
async def delete_conversation(
    conversation_id: Id, request: Request, service: HouseDep, conversations: ConversationsDep
) -> ConversationDeleted:
    """Delete a conversation with all of its items. Its responses stay until they are deleted too."""
    if not await asked(service, conversations.delete(conversation_id, tenant_of(request))):
        _missing(conversation_id)
    return ConversationDeleted(id=conversation_id)


@plain.get(_ITEMS, summary="List the items of a conversation")
async def list_items(
    conversation_id: Id,
    request: Request,
    service: HouseDep,
    conversations: ConversationsDep,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> ItemList:
    """List the items, the last one first by default."""
    tenant = tenant_of(request)
    try:
        page = await asked(
            service, conversations.page(conversation_id, tenant, after=after, limit=limit, ascending=order == "asc")
        )
    except KeyError:
        fail("after", f"after must be the id of one of the conversation's items, got {shown(after)}.")
    if page is None:
        _missing(conversation_id)
    return ItemList.of(page.items, more=page.more)


@router.post(_ITEMS, summary="Add items to a conversation")
async def add_items(
    conversation_id: Id,
    body: Annotated[NewItems, Body(openapi_examples=examples.CONVERSATION_ITEMS)],
    request: Request,
    response: Response,
    service: HouseDep,
    conversations: ConversationsDep,
) -> ItemList:
    """Add items at the end of a conversation."""
    items = _read(body, response, service)
    try:
        more = conversations.add(conversation_id, tenant_of(request), items, MAX_MESSAGES, _max_size(service))
        added = await asked(service, more)
    except ConversationTooLargeError as problem:
        _too_large(problem)
    if added is None:
        _missing(conversation_id)
    return ItemList.of(added, more=False)


@plain.get(f"{_ITEMS}/{{item_id}}", summary="Show an item of a conversation")
async def get_item(
    conversation_id: Id, item_id: ItemId, request: Request, service: HouseDep, conversations: ConversationsDep
) -> Item:
    """Show one item."""
    return await asked(service, conversations.item(conversation_id, tenant_of(request), item_id)) or _missing(
        conversation_id, item_id
    )


@plain.delete(f"{_ITEMS}/{{item_id}}", summary="Delete an item of a conversation")
async def delete_item(
    conversation_id: Id, item_id: ItemId, request: Request, service: HouseDep, conversations: ConversationsDep
) -> ConversationObject:
    """Delete one item; returns the conversation."""
    left = await asked(service, conversations.delete_item(conversation_id, tenant_of(request), item_id))
    return _shown(left or _missing(conversation_id, item_id))


def _read(body: ConversationFields | NewItems, response: Response, service: Service) -> list[Item]:
    ignored = Ignored(sees=service.sees)
    ignored.update(body.ignored_fields())
    items = [] if body.items is None else read_items(body.items, ignored, "items")
    response.headers.update(ignored_header(ignored))
    return items


def _max_size(service: Service) -> int:
    """Maximum bytes of a conversation, because a later request reads all of it."""
    return parse_bytes(service.settings.max_body_size, "max_body_size")


def _too_large(problem: ConversationTooLargeError) -> NoReturn:
    fail("items", f"The conversation cannot take these items: {problem}.", "context_length_exceeded")


def _missing(id_: str, item: str | None = None) -> NoReturn:
    where = f"conversation {shown(id_)}"
    message = f"There is no {where}." if item is None else f"There is no item {shown(item)} in {where}."
    param = "conversation_id" if item is None else "item_id"
    raise ApiError(404, message, param=param, code="not_found")


def _shown(conversation: StoredConversation) -> ConversationObject:
    return ConversationObject(id=conversation.id, created_at=conversation.created, metadata=conversation.metadata)
