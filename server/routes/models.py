"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from engine import EngineInfo
from server.answering.endpoints import served_endpoints
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


def _card(service: Service) -> ModelCard:
    info = service.client.info
    served = served_endpoints(info, service.tokenizer)
    return ModelCard(
        id=service.model_id,
        created=service.created,
        root=service.model_id,
        max_model_len=info.max_model_len,
        max_encoder_len=info.max_encoder_len,
        tasks=list(info.tasks),
        endpoints=served,
        inputs=_inputs(info),
        decoding=info.decoding or None,
        given_up_for_temperature=list(info.given_up_for_temperature) or None,
        embedding_size=info.embedding_size or None,
        labels=list(info.labels) or None,
        catalogues={found.name: found.titles for found in info.catalogues} or None,
    )


def _message_model(service: Service) -> MessageModel:
    info = service.client.info
    return MessageModel(
        id=service.model_id,
        display_name=service.model_id,
        created_at=datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
        max_input_tokens=info.max_encoder_len or info.max_model_len,
        max_tokens=info.max_model_len,
    )


def _whole(answer: MessageModel | MessageModelList) -> Response:
    """The body with its nulls, which Anthropic's clients look for."""
    return Response(answer.model_dump_json(), media_type="application/json")


def _inputs(info: EngineInfo) -> list[str]:
    signal = [] if info.signal is None else [str(info.signal.kind)]
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
    """List the model that this server serves."""
    if version is not None:
        return _whole(
            MessageModelList(data=[_message_model(service)], first_id=service.model_id, last_id=service.model_id)
        )
    return ModelList(data=[_card(service)])


# A path, because hub ids hold slashes.
@router.get("/models/{model_id:path}", response_model=Model, response_model_exclude_none=True, include_in_schema=False)
@router.get(
    "/v1/models/{model_id:path}",
    response_model=Model,
    responses=_ERRORS,
    response_model_exclude_none=True,
    summary="Describe a served model",
)
async def get_model(model_id: str, service: ServiceDep, version: Version = None) -> ModelCard | Response:
    """Return the served model. Other ids get 404."""
    service.check_model(model_id, exactly=True)
    return _card(service) if version is None else _whole(_message_model(service))
