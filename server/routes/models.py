"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from engine import AdapterInfo, EngineInfo
from server.api.message_schemas import MessageError, MessageModel, MessageModelList
from server.api.schemas import ModelCard, ModelList
from server.context import Service, ServiceDep
from server.door.message_errors import VERSION_HEADER
from server.errors import ERROR_RESPONSES

router = APIRouter()

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {**said, "model": said["model"] | MessageError} for status, said in ERROR_RESPONSES.items()
}
Models, Model = ModelList | MessageModelList, ModelCard | MessageModel
Version = Annotated[
    str | None, Header(alias=VERSION_HEADER, description="With any value, the answer has Anthropic's format.")
]


def card_of(service: Service, adapter: AdapterInfo | None = None) -> ModelCard:
    """The description of a loaded model, or of one of its adapters."""
    info = service.client.info
    return ModelCard(
        id=service.model_id if adapter is None else adapter.name,
        created=service.created,
        root=service.model_id if adapter is None else adapter.path,
        parent=None if adapter is None else service.model_id,
        max_model_len=info.max_model_len,
        max_encoder_len=info.max_encoder_len,
        tasks=list(info.tasks),
        endpoints=service.served_endpoints,
        inputs=_inputs(info),
        decoding=info.decoding or None,
        given_up_for_temperature=list(info.given_up_for_temperature) or None,
        embedding_size=info.embedding_size or None,
        labels=list(info.labels) or None,
        catalogues={found.name: found.titles for found in info.catalogues} or None,
    )


def message_model(service: Service, name: str) -> MessageModel:
    """The model's entry in Anthropic's shape."""
    info = service.client.info
    return MessageModel(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=info.max_encoder_len or info.max_model_len,
        max_tokens=info.max_model_len,
    )


def whole(answer: MessageModel | MessageModelList) -> Response:
    """The body with its nulls, which Anthropic's clients expect."""
    return Response(answer.model_dump_json(), media_type="application/json")


def _inputs(info: EngineInfo) -> list[str]:
    signal = [] if info.signal is None else [str(info.signal.kind)]
    if info.vision is not None:
        signal.append("image")
    reads_text = info.vocab_size > 0 and info.speech is None
    return ["text"] * reads_text + signal


@router.get("/models", response_model=Models, response_model_exclude_none=True, include_in_schema=False)
@router.get(
    "/v1/models",
    response_model=Models,
    responses=_ERRORS,
    response_model_exclude_none=True,
    summary="List the served models",
)
async def list_models(service: ServiceDep, version: Version = None) -> ModelList | Response:
    """List the model that this server serves, and its adapters."""
    served = [None, *service.client.adapters.values()]
    if version is not None:
        models = [message_model(service, adapter.name if adapter else service.model_id) for adapter in served]
        return whole(MessageModelList(data=models, first_id=models[0].id, last_id=models[-1].id))
    return ModelList(data=[card_of(service, adapter) for adapter in served])


# A path, because hub ids contain slashes.
@router.get("/models/{model_id:path}", response_model=Model, response_model_exclude_none=True, include_in_schema=False)
@router.get(
    "/v1/models/{model_id:path}",
    response_model=Model,
    responses=_ERRORS,
    response_model_exclude_none=True,
    summary="Describe a served model",
)
async def get_model(model_id: str, service: ServiceDep, version: Version = None) -> ModelCard | Response:
    """Return the served model, or one of its adapters. Other ids get 404."""
    service.check_model(model_id, exactly=True)
    adapter = service.client.adapters.get(model_id)
    return card_of(service, adapter) if version is None else whole(message_model(service, model_id))
