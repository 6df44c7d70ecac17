"""Ollama's endpoints about models, for a service with several. They load no model."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from engine import EngineInfo
from engine.process.predict import MemoryPrediction
from server.answering.ollama_facts import written_template
from server.answering.ollama_input import find_model
from server.api import examples
from server.api.ollama_schemas import (
    OllamaListed,
    OllamaModels,
    OllamaNameRequest,
    OllamaProcesses,
    OllamaRunning,
    OllamaShown,
    OllamaStatus,
)
from server.api.reading import UntypedJsonRoute
from server.context import HouseDep, Models
from server.errors import ApiError
from server.models.engines import expected_info
from server.models.status import ModelStatus
from server.routes.ollama import ERRORS
from server.routes.ollama_models import (
    NEVER,
    description,
    facts_of,
    facts_of_files,
    name_in,
    not_pulled,
    pulled,
    shown_of,
)
from server.routes.several_models import models_of_house

router = APIRouter()
bodies = APIRouter(route_class=UntypedJsonRoute)
routers = (router, bodies)


@router.get("/api/tags", responses=ERRORS, summary="Ollama's list of models")
async def tags(house: HouseDep) -> OllamaModels:
    """List all models, loaded or not, as in Ollama's API."""
    models = models_of_house(house)
    return OllamaModels(models=[await _listed(models, status) for status in models_of_house(house).statuses()])


@router.get("/api/ps", responses=ERRORS, summary="Ollama's list of loaded models")
async def ps(house: HouseDep) -> OllamaProcesses:
    """List the loaded models and when they will be unloaded, as in Ollama's API."""
    found = []
    for status in models_of_house(house).statuses():
        service = models_of_house(house).service_of(status.name)
        if service is not None:
            info = service.client.info
            facts = await asyncio.to_thread(facts_of, service, status.name)
            size = status.memory or facts["size"]
            running = OllamaRunning(
                **facts | {"size": size},
                expires_at=NEVER if status.expires_at is None else _date(status.expires_at),
                size_vram=0 if info.device == "cpu" else size,
                context_length=info.max_model_len,
            )
            found.append(running)
    return OllamaProcesses(models=found)


@bodies.post("/api/show", responses=ERRORS, summary="Ollama's description of a model")
async def show(
    body: Annotated[OllamaNameRequest, Body(openapi_examples=examples.OLLAMA_NAME)], request: Request, house: HouseDep
) -> OllamaShown:
    """Describe a model, loaded or not, as in Ollama's API: its files, template, decoding parameters and abilities."""
    name, models = name_in(body), models_of_house(house)
    status = models.choose(request, name)
    service = models.service_of(status.name)
    if service is not None:
        return await asyncio.to_thread(shown_of, service, find_model(service, name) or status.name)
    await models.foreseen(status.name)
    return await asyncio.to_thread(_shown, models.choose(request, name))


@bodies.post(
    "/api/pull",
    response_model=OllamaStatus,
    responses={200: {"content": examples.LINES}, **ERRORS},
    summary="Ollama's download of a model",
)
async def pull(
    body: Annotated[OllamaNameRequest, Body(openapi_examples=examples.OLLAMA_NAME)], request: Request, house: HouseDep
) -> Response:
    """Report success for a model that is served, because clients pull before they ask. Others are refused."""
    name, models = name_in(body), models_of_house(house)
    try:
        models.choose(request, name)
    except ApiError as problem:
        if problem.status_code == 404:
            raise not_pulled(name, [status.name for status in models.statuses()]) from None
        raise
    return pulled(body)


async def _listed(models: Models, status: ModelStatus) -> OllamaListed:
    service = models.service_of(status.name)
    if service is None:
        facts = await asyncio.to_thread(facts_of_files, _info(status), status.name)
    else:
        facts = await asyncio.to_thread(facts_of, service, status.name)
    return OllamaListed(**facts, capabilities=list(status.abilities))


def _shown(status: ModelStatus) -> OllamaShown:
    info = _info(status)
    template = written_template(status.chat_template, info.model_path)
    return description(status.name, info, facts_of_files(info, status.name), template, status.abilities)


def _info(status: ModelStatus) -> EngineInfo:
    """The known facts of a model that is not loaded: at least its files."""
    return status.info or expected_info(status.source, MemoryPrediction(path=str(Path(status.source).expanduser())))


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
