"""GET /v1/models of a service with several models, and POST /v1/models/load and /v1/models/unload."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Response

from server.api.message_schemas import MessageModelList
from server.api.model_schemas import LoadedCard, LoadModelRequest, ModelStates, UnloadedCard
from server.api.reading import StrictJsonRoute
from server.context import HouseDep, Models, Service
from server.models.seen import no_model
from server.models.status import ModelStatus
from server.routes.models import Version, card_of, message_model, whole

router = APIRouter()
_loading = APIRouter(route_class=StrictJsonRoute)

_EXAMPLE = {"chat": {"value": {"model": "chat"}}}
_Card = LoadedCard | UnloadedCard


def models_of_house(house: Service) -> Models:
    assert house.models is not None
    return house.models


def _state(status: ModelStatus) -> dict[str, Any]:
    return {
        "state": status.state,
        "reason": status.reason or None,
        "aliases": list(status.aliases) or None,
        "pinned": status.pinned,
        "percent": status.percent,
        "memory": status.memory,
        "weights": status.size,
        "running_requests": status.running,
        "loaded_at": status.loaded_at,
        "expires_at": status.expires_at,
    }


def _cards(house: Service, status: ModelStatus) -> list[_Card]:
    service = models_of_house(house).service_of(status.name)
    if service is None:
        return [
            UnloadedCard(
                id=name,
                created=house.created,
                root=root,
                parent=None if name == status.name else status.name,
                max_model_len=status.max_model_len,
                tasks=list(status.tasks),
                endpoints=list(status.endpoints) or None,
                **_state(status),
            )
            for name, root in {status.name: status.name, **status.adapters}.items()
        ]
    adapters = [None, *service.client.adapters.values()]
    return [LoadedCard(**dict(card_of(service, adapter)), **_state(status)) for adapter in adapters]


@router.get("/models", response_model=ModelStates, response_model_exclude_none=True, include_in_schema=False)
@router.get(
    "/v1/models", response_model=ModelStates, response_model_exclude_none=True, summary="List the served models"
)
async def list_models(house: HouseDep, version: Version = None) -> ModelStates | Response:
    """List all models that the API key may use, with their states."""
    statuses = models_of_house(house).statuses()
    if version is not None:
        services = [(status, models_of_house(house).service_of(status.name)) for status in statuses]
        shown_models = [message_model(service or house, status.name) for status, service in services]
        names = [status.name for status in statuses] or [""]
        return whole(MessageModelList(data=shown_models, first_id=names[0], last_id=names[-1]))
    return ModelStates(data=[card for status in statuses for card in _cards(house, status)])


@router.get("/models/{model_id:path}", response_model=_Card, response_model_exclude_none=True, include_in_schema=False)
@router.get(
    "/v1/models/{model_id:path}",
    response_model=_Card,
    response_model_exclude_none=True,
    summary="Describe a served model",
)
async def get_model(model_id: str, house: HouseDep, version: Version = None) -> _Card | Response:
    """Return a model with its state, or one of its adapters. Other ids get 404."""
    status = models_of_house(house).find(model_id)
    if status is None:
        raise no_model(model_id, [status.name for status in models_of_house(house).statuses()])
    if version is not None:
        return whole(message_model(models_of_house(house).service_of(status.name) or house, status.name))
    cards = _cards(house, status)
    return next((card for card in cards if card.id == model_id), cards[0])


@_loading.post("/v1/models/load", response_model=_Card, response_model_exclude_none=True, summary="Load a model")
async def load_model(body: Annotated[LoadModelRequest, Body(openapi_examples=_EXAMPLE)], house: HouseDep) -> _Card:
    """Load a model, and answer when it serves. The least recently used models may be unloaded for it."""
    return _cards(house, await models_of_house(house).load(body.model))[0]


@_loading.post("/v1/models/unload", response_model=_Card, response_model_exclude_none=True, summary="Unload a model")
async def unload_model(body: Annotated[LoadModelRequest, Body(openapi_examples=_EXAMPLE)], house: HouseDep) -> _Card:
    """Unload a model that no request uses. The next request to it loads it again."""
    return _cards(house, await models_of_house(house).unload(body.model))[0]


router.include_router(_loading)
