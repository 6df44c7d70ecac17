"""Ollama's lists of models, for a service with several. They load no model."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from server.answering.ollama_facts import capabilities, read_files
from server.answering.ollama_input import tagged
from server.api.ollama_schemas import OllamaDetails, OllamaListed, OllamaModels, OllamaProcesses, OllamaRunning
from server.context import HouseDep, Models
from server.models.status import ModelStatus
from server.routes.ollama import ERRORS
from server.routes.ollama_models import NEVER, facts_of
from server.routes.several_models import models_of_house

router = APIRouter()

_GGUF = ".gguf"


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


async def _listed(models: Models, status: ModelStatus) -> OllamaListed:
    service = models.service_of(status.name)
    if service is not None:
        facts = await asyncio.to_thread(facts_of, service, status.name)
        return OllamaListed(**facts, capabilities=capabilities(service))
    facts = await asyncio.to_thread(_unloaded, status)
    writes = "generate" in status.tasks
    able = {"completion": writes, "embedding": "embed" in status.tasks and not writes}
    return OllamaListed(**facts, capabilities=[name for name, has in able.items() if has])


def _unloaded(status: ModelStatus) -> dict[str, Any]:
    """The facts that the files of a model give before it is loaded."""
    path = Path(status.source).expanduser()
    packed = path.suffix == _GGUF
    files = read_files(str(path.parent if packed else path), str(path) if packed else None)
    details = OllamaDetails(
        parent_model="",
        format="gguf" if packed else "safetensors",
        family="",
        families=[],
        parameter_size="",
        quantization_level="",
    )
    return {
        "name": tagged(status.name),
        "model": tagged(status.name),
        "modified_at": files.modified,
        "size": files.size or status.size or 0,
        "digest": files.digest,
        "details": details,
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
