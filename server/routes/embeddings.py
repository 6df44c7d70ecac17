"""POST /v1/embeddings and /pooling."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from engine import EngineInfo, PoolingParams, Task, resolve_pooling
from engine.pooled import find_prompt, longest
from server.answering.endpoints import MATRIX_TASKS, require
from server.answering.matrices import MatrixRun, read_conversation
from server.api import examples
from server.api.embedding_schemas import (
    BYTES,
    EmbeddingRequest,
    EmbeddingResponse,
    MatrixBody,
    PoolingRequest,
    PoolingResponse,
)
from server.api.reading import StrictJsonRoute
from server.context import ServiceDep
from server.errors import ERROR_RESPONSES, ApiError, shown

router = APIRouter(route_class=StrictJsonRoute)

_RESPONSES: dict[int | str, dict[str, Any]] = {200: {"content": BYTES}, **ERROR_RESPONSES}


@router.post("/embeddings", include_in_schema=False)
@router.post(
    "/v1/embeddings", response_model=EmbeddingResponse, responses=_RESPONSES, summary="Texts and images to vectors"
)
async def create_embeddings(
    body: Annotated[EmbeddingRequest, Body(openapi_examples=examples.EMBEDDINGS)],
    request: Request,
    service: ServiceDep,
) -> Response:
    """One vector for each input. For models that give vectors (`tasks` in /v1/models: embed)."""
    arrival = time.monotonic()
    service.check_model(body.model)
    require(service, "/v1/embeddings")
    body.refuse_unsupported()
    info = service.client.info
    params = PoolingParams(task="embed", pooling=body.pooling, normalize=body.normalizes(), dimensions=body.dimensions)
    resolve_pooling(params, info, prompt_len=1)  # what is impossible is said before any work
    run = _EmbeddingRun(
        service,
        body,
        arrival,
        params=params,
        asked=read_conversation(body, service),
        prompt=find_prompt(info, body.prompt_name),
        truncate=longest(body.truncate_prompt_tokens, info),
        shape=b'{"object":"embedding","index":%d,"embedding":%b}',
    )
    check_prompt_name(body, run)
    return await run.respond(request)


def check_prompt_name(body: MatrixBody, run: MatrixRun) -> None:
    """Refuse the name of a prompt for inputs that none stands before.

    Raises:
        ApiError: there are no texts.
    """
    if body.prompt_name is not None and not run.texts:
        message = "prompt_name goes with texts: token ids are taken as they are. Put the prompt's tokens among them."
        raise ApiError(400, message, param="prompt_name", code="invalid_value")


@router.post("/pooling", response_model=PoolingResponse, responses=_RESPONSES, summary="What a model's head says")
async def create_pooling(
    body: Annotated[PoolingRequest, Body(openapi_examples=examples.POOLING)], request: Request, service: ServiceDep
) -> Response:
    """The head's numbers for each input, as vLLM's endpoint of this name has them: a vector, the classes, the classes
    of each token, a vector of each token, or weights of tokens."""
    arrival = time.monotonic()
    service.check_model(body.model)
    require(service, "/pooling")
    body.refuse_unsupported()
    info = service.client.info
    params = _params(body, info)
    run = _TaskRun(
        service,
        body,
        arrival,
        params=params,
        asked=read_conversation(body, service),
        prompt=find_prompt(info, body.prompt_name) if params.task in PROMPTED else "",
        truncate=longest(body.truncate_prompt_tokens, info),
        shape=b'{"object":"pooling","index":%d,"data":%b}',
    )
    check_prompt_name(body, run)
    return await run.respond(request)


def _params(body: PoolingRequest, info: EngineInfo) -> PoolingParams:
    """What is asked of each input.

    Raises:
        ApiError: the model cannot do it, or a field goes with another task.
    """
    known: list[Task] = [task for task in MATRIX_TASKS if task in info.tasks]
    task = next((task for task in known if body.task in (None, task)), None)
    if task is None:
        message = f"task must be {' or '.join(known)} for this model, got {shown(body.task)}."
        raise ApiError(400, message, param="task", code="unsupported_task")
    if body.prompt_name is not None and task not in PROMPTED:
        message = f"prompt_name goes with vectors, and this is {task}; leave it out."
        raise ApiError(400, message, param="prompt_name", code="unsupported_parameter")
    if task == "sparse_embed" and body.encoding_format not in (None, "float"):
        message = f"encoding_format {body.encoding_format} holds numbers alone; task sparse_embed gives tokens, too."
        raise ApiError(400, message, param="encoding_format", code="unsupported_parameter")
    if task == "token_embed" and body.dimensions is None:
        return PoolingParams(task=task, normalize=body.normalizes())
    if task == "embed":
        params = PoolingParams(task=task, normalize=body.normalizes(), dimensions=body.dimensions)
        resolve_pooling(params, info, prompt_len=1)
        return params
    for name in ("dimensions", "normalize"):
        if getattr(body, name) is not None:
            message = f"{name} goes with task embed, and this is {task}; leave it out."
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    return PoolingParams(task=task, use_activation=body.use_activation)


# Tasks before which a prompt stands.
PROMPTED: tuple[Task, ...] = ("embed", "token_embed", "sparse_embed")


@dataclass(slots=True)
class _EmbeddingRun(MatrixRun):
    id_prefix = "embd"


@dataclass(slots=True)
class _TaskRun(MatrixRun):
    id_prefix = "pool"
