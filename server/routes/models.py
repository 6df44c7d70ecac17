"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter

from engine import EngineInfo
from server.answering.endpoints import served_endpoints
from server.api.schemas import ModelCard, ModelList
from server.context import Service, ServiceDep
from server.errors import ERROR_RESPONSES

router = APIRouter()


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
        embedding_size=info.embedding_size or None,
        labels=list(info.labels) or None,
        catalogues={found.name: found.titles for found in info.catalogues} or None,
    )


def _inputs(info: EngineInfo) -> list[str]:
    signal = [] if info.signal is None else [str(info.signal.kind)]
    reads_text = info.vocab_size > 0 and info.speech is None
    return ["text"] * reads_text + signal


@router.get("/models", response_model_exclude_none=True, include_in_schema=False)
@router.get("/v1/models", responses=ERROR_RESPONSES, response_model_exclude_none=True, summary="List the served models")
async def list_models(service: ServiceDep) -> ModelList:
    """The one model that this server serves."""
    return ModelList(data=[_card(service)])


# A path, because hub ids hold slashes.
@router.get("/models/{model_id:path}", response_model_exclude_none=True, include_in_schema=False)
@router.get(
    "/v1/models/{model_id:path}",
    responses=ERROR_RESPONSES,
    response_model_exclude_none=True,
    summary="Describe a served model",
)
async def get_model(model_id: str, service: ServiceDep) -> ModelCard:
    """The model of that id; 404 for any other than the served one."""
    service.check_model(model_id, exactly=True)
    return _card(service)
