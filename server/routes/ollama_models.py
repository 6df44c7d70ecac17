"""The endpoints of Ollama's API about models: those that list, show and load, and the refusals of those that store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Body, Response

from engine import AdapterInfo, EngineInfo
from server.answering.ollama_events import NDJSON, written
from server.answering.ollama_facts import capabilities, details_of, files_of, model_info
from server.answering.ollama_input import find_model, served_names, tagged
from server.api import examples
from server.api.ollama_schemas import (
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
from server.routes.ollama import ERRORS

router = APIRouter()
listing = APIRouter()  # of the only model and its adapters
home = APIRouter()  # if no page is at /
serving = APIRouter(route_class=UntypedJsonRoute)  # likewise

OLLAMA = "0.13.0"
"""The version of the API: clients refuse servers that are older than they need."""
NEVER = "9999-12-31T23:59:59Z"
_STORES = "This server stores no models, so it cannot {action} any. Start it with the models to serve."


@router.get("/api/version", responses=ERRORS, summary="Ollama's version")
async def version(service: HouseDep) -> OllamaVersion:
    """Return the version of Ollama whose API this server follows, and the server's own version."""
    return OllamaVersion(version=OLLAMA, octavo=service.version)


@listing.get("/api/tags", responses=ERRORS, summary="Ollama's list of models")
async def tags(service: ServiceDep) -> OllamaModels:
    """List the served model and its adapters, as in Ollama's API."""
    able = capabilities(service)
    return OllamaModels(
        models=[
            OllamaListed(**await asyncio.to_thread(facts_of, service, name), capabilities=able)
            for name in served_names(service)
        ]
    )


@listing.get("/api/ps", responses=ERRORS, summary="Ollama's list of loaded models")
async def ps(service: ServiceDep) -> OllamaProcesses:
    """List the loaded models, as in Ollama's API. A served model is never unloaded."""
    info = service.client.info
    return OllamaProcesses(
        models=[
            OllamaRunning(
                **(facts := await asyncio.to_thread(facts_of, service, name)),
                expires_at=NEVER,
                size_vram=0 if info.device == "cpu" else facts["size"],
                context_length=info.max_model_len,
            )
            for name in served_names(service)[:1]
        ]
    )


@serving.post("/api/show", responses=ERRORS, summary="Ollama's description of a model")
async def show(
    body: Annotated[OllamaNameRequest, Body(openapi_examples=examples.OLLAMA_NAME)], service: ServiceDep
) -> OllamaShown:
    """Describe a served model, as in Ollama's API: its files, template, decoding parameters and abilities."""
    return await asyncio.to_thread(shown_of, service, find_model(service, name_in(body)) or service.model_id)


@serving.post(
    "/api/pull",
    response_model=OllamaStatus,
    responses={200: {"content": examples.LINES}, **ERRORS},
    summary="Ollama's download of a model",
)
async def pull(
    body: Annotated[OllamaNameRequest, Body(openapi_examples=examples.OLLAMA_NAME)], service: ServiceDep
) -> Response:
    """Report success for a model that is served, because clients pull before they ask. Others are refused."""
    name = name_in(body)
    try:
        find_model(service, name)
    except ApiError:
        raise not_pulled(name, served_names(service)) from None
    return pulled(body)


def not_pulled(name: str, served: Sequence[str]) -> ApiError:
    """The error for a model that is not served.

    Args:
        served: names of the models that the caller may use.
    """
    names = ", ".join(map(shown, served))
    message = f"The model {shown(name)} is not served, and this server does not download models. It serves {names}."
    return ApiError(404, message, param="model", code="model_not_found")


def pulled(body: OllamaNameRequest) -> Response:
    """The answer for a model that is served."""
    if body.stream is False:
        return Response('{"status":"success"}', media_type="application/json")
    lines = (written({"status": status}) for status in ("pulling manifest", "success"))
    return Response("".join(lines), media_type=NDJSON)


def _refuses(action: str) -> Callable[[], Coroutine[None, None, NoReturn]]:
    async def refuse() -> NoReturn:
        raise ApiError(400, _STORES.format(action=action), code="unsupported_endpoint")

    return refuse


for _method, _path, _action in (
    ("POST", "/api/create", "create"),
    ("POST", "/api/push", "push"),
    ("POST", "/api/copy", "copy"),
    ("DELETE", "/api/delete", "delete"),
    ("POST", "/api/blobs/{digest}", "receive"),
):
    router.add_api_route(_path, _refuses(_action), methods=[_method], response_model=None, include_in_schema=False)


@router.get("/api/blobs/{digest}", include_in_schema=False)
async def find_blob(digest: str) -> None:
    """Answer that there is no such blob."""
    raise ApiError(404, f"blob {shown(digest)} not found: this server stores no models.", code="unknown_route")


@home.get("/", include_in_schema=False)
async def running() -> Response:
    """The words that Ollama's clients look for."""
    return Response("Ollama is running", media_type="text/plain; charset=utf-8")


def name_in(body: OllamaNameRequest) -> str:
    """The name of the model that a request is about. Raises ApiError if there is none."""
    name = body.model or body.name
    if not name:
        raise ApiError(400, "model is required.", param="model", code="missing_required_parameter")
    return name


def shown_of(service: Service, name: str) -> OllamaShown:
    """The description of a loaded model, or of one of its adapters. It reads files."""
    facts = facts_of(service, name)
    template = (service.tokenizer.chat_template or "") if service.tokenizer is not None else ""
    return description(name, service.client.info, facts, template, capabilities(service))


def description(
    name: str, info: EngineInfo, facts: dict[str, Any], template: str, abilities: Sequence[str]
) -> OllamaShown:
    """A model in the form of /api/show.

    Args:
        facts: as `facts_of` returns them.
    """
    return OllamaShown(
        modelfile=f"# The model is served by Octavo, whose chat template is Jinja.\nFROM {name}\n",
        parameters="\n".join(f"{field:<30} {value}" for field, value in info.decoding.items()),
        template=template,
        details=facts["details"],
        model_info=model_info(info),
        capabilities=list(abilities),
        modified_at=facts["modified_at"],
    )


def facts_of(service: Service, name: str) -> dict[str, Any]:
    """The fields that all lists of models share. The facts of an adapter are those of its base model."""
    adapter: AdapterInfo | None = service.client.adapters.get(name)
    return facts_of_files(service.client.info, name, "" if adapter is None else service.model_id)


def facts_of_files(info: EngineInfo, name: str, parent: str = "") -> dict[str, Any]:
    """The fields of `facts_of`, from the files of a model, whether it is loaded or not. `parent`: the base model's
    name, for an adapter."""
    files = files_of(info)
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": files.modified,
        "size": files.size,
        "digest": files.digest,
        "details": details_of(info, name, parent),
    }
