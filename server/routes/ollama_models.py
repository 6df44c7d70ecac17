"""The endpoints of Ollama's API about models: those that list, show and load, and the refusals of those that store."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Body, Response

from server.answering.ollama_events import NDJSON, written
from server.answering.ollama_facts import (
    FileFacts,
    capabilities,
    details_at,
    details_of,
    files_at,
    files_of,
    model_info,
    timestamp,
)
from server.answering.ollama_input import LATEST, find_model, served_names, tagged
from server.api import examples
from server.api.ollama_schemas import (
    OllamaDetails,
    OllamaListed,
    OllamaModels,
    OllamaNameRequest,
    OllamaProcesses,
    OllamaRunning,
    OllamaShown,
    OllamaStatus,
    OllamaVersion,
)
from server.api.reading import UntypedJsonRoute
from server.context import HouseDep, Service, ServiceDep
from server.errors import ApiError, shown
from server.models.one import models_of
from server.routes.ollama import ERRORS

router = APIRouter()
home = APIRouter()  # where no page is at /
bodies = APIRouter(route_class=UntypedJsonRoute)

OLLAMA = "0.13.0"
"""The version whose API this is: clients refuse servers that are older than what they need."""
NEVER = "9999-12-31T23:59:59Z"
_STORES = "This server stores no models, so that it cannot {action} any. Start it with the models that it is to serve."


@router.get("/api/version", responses=ERRORS, summary="Ollama's version")
async def version(service: HouseDep) -> OllamaVersion:
    """Return the version of Ollama whose API this server follows, and the server's own version."""
    return OllamaVersion(version=OLLAMA, octavo=service.version)


@router.get("/api/tags", responses=ERRORS, summary="Ollama's list of models")
async def tags(service: HouseDep) -> OllamaModels:
    """List the served models and their adapters, as in Ollama's API."""
    return OllamaModels(models=[OllamaListed(**facts) for facts in await asyncio.to_thread(_listed, service)])


@router.get("/api/ps", responses=ERRORS, summary="Ollama's list of loaded models")
async def ps(service: HouseDep) -> OllamaProcesses:
    """List the loaded models, as in Ollama's API."""
    models = models_of(service)
    found = []
    for status in models.statuses():
        loaded = models.service_of(status.name)
        if loaded is not None and status.state == "loaded":
            info = loaded.client.info
            facts = await asyncio.to_thread(_facts, loaded, loaded.model_id)
            size = status.memory or facts["size"]
            ends = NEVER if status.expires_at is None else timestamp(status.expires_at)
            vram = 0 if info.device == "cpu" else size
            facts |= {"size": size, "expires_at": ends, "size_vram": vram, "context_length": info.max_model_len}
            found.append(OllamaRunning(**facts))
    return OllamaProcesses(models=found)


@bodies.post("/api/show", responses=ERRORS, summary="Ollama's description of a model")
async def show(
    body: Annotated[OllamaNameRequest, Body(openapi_examples=examples.OLLAMA_NAME)], service: ServiceDep
) -> OllamaShown:
    """Describe a served model, as in Ollama's API: its files, template, decoding parameters and abilities. A model that
    is not loaded is loaded first."""
    name = find_model(service, _named(body)) or service.model_id
    facts = await asyncio.to_thread(_facts, service, name)
    info, tokenizer = service.client.info, service.tokenizer
    template = (tokenizer.chat_template or "") if tokenizer is not None else ""
    parameters = "\n".join(f"{field:<30} {value}" for field, value in info.decoding.items())
    return OllamaShown(
        modelfile=f"# The model is served by Octavo, whose chat template is Jinja.\nFROM {name}\n",
        parameters=parameters,
        template=template,
        details=facts["details"],
        model_info=await asyncio.to_thread(model_info, info),
        capabilities=capabilities(service),
        modified_at=facts["modified_at"],
    )


@bodies.post(
    "/api/pull",
    response_model=OllamaStatus,
    responses={200: {"content": examples.LINES}, **ERRORS},
    summary="Ollama's download of a model",
)
async def pull(
    body: Annotated[OllamaNameRequest, Body(openapi_examples=examples.OLLAMA_NAME)], service: HouseDep
) -> Response:
    """Report success for a model that is served, because clients pull before they ask. Others are refused."""
    name, models = _named(body), models_of(service)
    if models.find(name) is None and models.find(name.removesuffix(f":{LATEST}")) is None:
        try:
            find_model(service, name)
        except ApiError:
            names = ", ".join(shown(status.name) for status in models.statuses())
            message = f"The model {shown(name)} is not served, and this server downloads none. It serves {names}."
            raise ApiError(404, message, param="model", code="model_not_found") from None
    if body.stream is False:
        return Response('{"status":"success"}', media_type="application/json")
    lines = (written({"status": status}) for status in ("pulling manifest", "success"))
    return Response("".join(lines), media_type=NDJSON)


def _refuse(action: str) -> NoReturn:
    raise ApiError(400, _STORES.format(action=action), code="unsupported_endpoint")


@router.post("/api/create", include_in_schema=False)
async def create() -> None:
    """Refused."""
    _refuse("create")


@router.post("/api/push", include_in_schema=False)
async def push() -> None:
    """Refused."""
    _refuse("push")


@router.post("/api/copy", include_in_schema=False)
async def copy() -> None:
    """Refused."""
    _refuse("copy")


@router.delete("/api/delete", include_in_schema=False)
async def delete() -> None:
    """Refused."""
    _refuse("delete")


@router.get("/api/blobs/{digest}", include_in_schema=False)
async def find_blob(digest: str) -> None:
    """There is none."""
    raise ApiError(404, f"blob {shown(digest)} not found: this server stores no models.", code="unknown_route")


@router.post("/api/blobs/{digest}", include_in_schema=False)
async def create_blob(digest: str) -> None:
    """Refused."""
    _refuse("receive")


@home.get("/", include_in_schema=False)
async def running() -> Response:
    """The words that Ollama's clients look for."""
    return Response("Ollama is running", media_type="text/plain; charset=utf-8")


def _named(body: OllamaNameRequest) -> str:
    """The name of the model that a request is about.

    Raises:
        ApiError: there is none.
    """
    name = body.model or body.name
    if not name:
        raise ApiError(400, "model is required.", param="model", code="missing_required_parameter")
    return name


def _listed(service: Service) -> list[dict[str, Any]]:
    """The facts of all models and adapters. Of a model that is not loaded, the files alone are known."""
    models = models_of(service)
    found: list[dict[str, Any]] = []
    for status in models.statuses():
        loaded = models.service_of(status.name)
        if loaded is not None:
            able = capabilities(loaded)
            found += [_facts(loaded, name) | {"capabilities": able} for name in served_names(loaded)]
            continue
        files = files_at(status.source)
        able = ["completion"] * ("generate" in status.tasks) or ["embedding"] * ("embed" in status.tasks)
        facts = _shared(status.name, files, details_at(status.source, files))
        found.append(facts | {"size": files.size or status.size or 0, "capabilities": able})
    return found


def _facts(service: Service, name: str) -> dict[str, Any]:
    """The fields that all lists of models share. The facts of an adapter are those of its base model."""
    info = service.client.info
    parent = service.model_id if name in service.client.adapters else ""
    return _shared(name, files_of(info), details_of(info, name, parent))


def _shared(name: str, files: FileFacts, details: OllamaDetails) -> dict[str, Any]:
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": files.modified,
        "size": files.size,
        "digest": files.digest,
        "details": details,
    }
