"""POST /v1/embeddings and /pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fastapi import Response

from engine import EngineInfo, Pooled, PoolingParams, Task, resolve_pooling
from engine.pooled import comparison_of, find_prompt, longest
from engine.pooled.vectors import json_matrix
from engine.text.processor import Tokenizer
from server.answering.endpoints import kind_of
from server.answering.matrices import MatrixRun, read_conversation
from server.answering.pooling import PoolingInput, joined
from server.api import examples
from server.api.embedding_schemas import (
    BYTES,
    EmbeddingRequest,
    EmbeddingResponse,
    MatrixBody,
    PoolingRequest,
    PoolingResponse,
)
from server.api.pooling_schemas import PoolingUsage
from server.errors import ApiError, shown
from server.routes.task_router import TaskCall, TaskRouter

router = TaskRouter("pooling")

# Tasks whose results are vectors or matrices; the first one that a model supports is its default.
_TASKS: tuple[Task, ...] = ("embed", "classify", "token_classify", "token_embed", "sparse_embed")


def _lacks_vectors(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    if "embed" in info.tasks:
        return None
    kind = "it is a retrieval model" if comparison_of(info) is not None else kind_of(info)
    return f"{kind}, and it returns no vectors for whole texts"


def _lacks_tasks(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    return None if set(_TASKS) & set(info.tasks) else f"{kind_of(info)}, and it returns neither vectors nor classes"


@router.endpoint(
    "/v1/embeddings",
    "/embeddings",
    response_model=EmbeddingResponse,
    examples=examples.EMBEDDINGS,
    events=BYTES,
    lacks=_lacks_vectors,
    summary="Create embeddings",
)
async def create_embeddings(call: TaskCall[EmbeddingRequest]) -> Response:
    """Return a vector for each input. The model must have the task embed (`tasks` in /v1/models)."""
    body, info = call.body, call.service.client.info
    params = PoolingParams(task="embed", pooling=body.pooling, normalize=body.normalizes(), dimensions=body.dimensions)
    resolve_pooling(params, info, prompt_len=1)  # report impossible fields before any work
    run = call.run(
        _EmbeddingRun,
        params=params,
        asked=read_conversation(body, call.service),
        prompt=find_prompt(info, body.prompt_name),
        truncate=longest(body.truncate_prompt_tokens, info),
        shape=b'{"object":"embedding","index":%d,"embedding":%b}',
    )
    check_prompt_name(body, run)
    return await run.respond(call.request)


def check_prompt_name(body: MatrixBody, run: MatrixRun) -> None:
    """Refuse a prompt's name if no input can have a prompt. Raises ApiError if there are no texts."""
    if body.prompt_name is not None and not run.texts:
        message = "prompt_name only works with texts. Add the prompt's tokens to the token ids."
        raise ApiError(400, message, param="prompt_name", code="invalid_value")


@router.endpoint(
    "/pooling",
    response_model=PoolingResponse,
    examples=examples.POOLING,
    events=BYTES,
    lacks=_lacks_tasks,
    summary="Run a pooling task",
)
async def create_pooling(call: TaskCall[PoolingRequest]) -> Response:
    """Return the output of the model's head for each input, as in vLLM: a vector, class scores, class scores per token,
    a vector per token, or token weights. A list of tasks returns each kind by its name."""
    body, info = call.body, call.service.client.info
    asked = body.task if isinstance(body.task, list) else [body.task]
    tasks = [_params(body, info, task) for task in asked]
    params = tasks[0]
    if isinstance(body.task, list):
        _check_together(body, tasks, info)
    run = call.run(
        _TasksRun if isinstance(body.task, list) else _TaskRun,
        params=params,
        tasks=tasks,
        asked=read_conversation(body, call.service),
        prompt=find_prompt(info, body.prompt_name) if params.task in PROMPTED else "",
        truncate=longest(body.truncate_prompt_tokens, info),
        shape=b'{"object":"pooling","index":%d,"data":%b}',
    )
    check_prompt_name(body, run)
    return await run.respond(call.request)


def _check_together(body: PoolingRequest, tasks: Sequence[PoolingParams], info: EngineInfo) -> None:
    names = [params.task for params in tasks]
    if len(set(names)) < len(names) or not set(names) <= set(PROMPTED):
        message = f"task as a list must contain distinct values of {', '.join(PROMPTED)}, got {shown(names)}."
        raise ApiError(400, message, param="task", code="invalid_value")
    sides = {} if info.token_vectors is None else info.token_vectors.sides
    if len(names) > 1 and body.prompt_name in sides:
        message = f"prompt_name {body.prompt_name} works with token_embed only. Send separate requests."
        raise ApiError(400, message, param="prompt_name", code="unsupported_parameter")
    if body.encoding_format not in (None, "float"):
        message = f"encoding_format must be float for several tasks, got {body.encoding_format}."
        raise ApiError(400, message, param="encoding_format", code="unsupported_parameter")


def _params(body: PoolingRequest, info: EngineInfo, asked: str | None) -> PoolingParams:
    """The parameters of each input. `asked`: the task; None for the model's first. Raises ApiError if the model does
    not support the task, or a field belongs to another task."""
    known: list[Task] = [task for task in _TASKS if task in info.tasks]
    task = next((task for task in known if asked in (None, task)), None)
    if task is None:
        message = f"task must be {' or '.join(known)} for this model, got {shown(asked)}."
        raise ApiError(400, message, param="task", code="unsupported_task")
    if body.prompt_name is not None and task not in PROMPTED:
        message = f"prompt_name only works with embedding tasks, not with {task}. Remove it."
        raise ApiError(400, message, param="prompt_name", code="unsupported_parameter")
    if task == "sparse_embed" and body.encoding_format not in (None, "float"):
        message = (
            f"encoding_format {body.encoding_format} can only hold numbers, but the task sparse_embed also "
            f"returns tokens."
        )
        raise ApiError(400, message, param="encoding_format", code="unsupported_parameter")
    if task == "token_embed" and body.dimensions is None:
        return PoolingParams(task=task, normalize=body.normalizes())
    if task == "embed":
        params = PoolingParams(task=task, normalize=body.normalizes(), dimensions=body.dimensions)
        resolve_pooling(params, info, prompt_len=1)
        return params
    for name in ("dimensions", "normalize"):
        if getattr(body, name) is not None:
            message = f"{name} only works with the task embed, not with {task}. Remove it."
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    return PoolingParams(task=task, use_activation=body.use_activation)


# Tasks whose texts may have a prompt.
PROMPTED: tuple[Task, ...] = ("embed", "token_embed", "sparse_embed")


@dataclass(slots=True)
class _EmbeddingRun(MatrixRun):
    id_prefix = "embd"


@dataclass(slots=True)
class _TaskRun(MatrixRun):
    id_prefix = "pool"
    tasks: list[PoolingParams] = field(kw_only=True)


@dataclass(slots=True)
class _TasksRun(_TaskRun):
    """Several kinds of vectors for each input. The engine reads an input once for each; `usage` counts it once."""

    def size(self) -> int:
        return MatrixRun.size(self) * len(self.tasks)

    async def inputs(self) -> list[PoolingInput]:
        read = await MatrixRun.inputs(self)
        if len(self.tasks) == 1:
            return list(read)
        return [
            replace(item, params=replace(params, skip_tokens=item.params.skip_tokens))
            for item in read
            for params in self.tasks
        ]

    @property
    def usage(self) -> PoolingUsage:
        count = self.num_tokens // len(self.tasks)
        return PoolingUsage(prompt_tokens=count, total_tokens=count)

    def render(self, answers: Sequence[Pooled]) -> bytes:
        kinds = len(self.tasks)
        items = (self._item(answers[start : start + kinds]) for start in range(0, len(answers), kinds))
        return joined(self, (self.shape % entry for entry in enumerate(items)))

    def _item(self, answers: Sequence[Pooled]) -> bytes:
        written = []
        for params, answer in zip(self.tasks, answers, strict=True):
            if params.task == "sparse_embed":
                (value,) = self.sparse([answer])
            else:
                value = json_matrix(answer.values(), rows=params.task == "token_embed")
            written.append(b'"%b":%b' % (params.task.encode(), value))
        return b"{%b}" % b",".join(written)
