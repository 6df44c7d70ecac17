"""POST /api/embed and /api/embeddings, in Ollama's shapes, over the code that answers /v1/embeddings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Body, Request, Response
from pydantic_core import to_json

from engine import Pooled, PoolingParams, resolve_pooling
from engine.pooled import find_prompt
from engine.pooled.vectors import json_matrix
from server.answering.matrices import MatrixRun
from server.answering.ollama_input import find_model
from server.answering.public_names import valid
from server.api import examples
from server.api.embedding_schemas import EmbeddingRequest
from server.api.fields import ignored_header
from server.api.ollama_schemas import (
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from server.api.reading import UntypedJsonRoute
from server.context import Service, ServiceDep
from server.routes.ollama import ERRORS
from server.routes.task_router import TaskRouter

router = TaskRouter("pooling", route_class=UntypedJsonRoute)


@router.post("/api/embed", response_model=OllamaEmbedAnswer, responses=ERRORS, summary="Ollama's embeddings")
async def embed(
    body: Annotated[OllamaEmbedRequest, Body(openapi_examples=examples.OLLAMA_EMBED)],
    request: Request,
    service: ServiceDep,
) -> Response:
    """Return a vector of length 1 for each text, as in Ollama's API. The model must have the task embed."""
    arrival = time.monotonic()
    params = PoolingParams(task="embed", normalize=True, dimensions=body.dimensions or None)
    run = _run_of(body, body.input or [], params, service, arrival, cut=body.truncate is not False)
    if run is None:
        empty = {"model": body.model or service.model_id, "embeddings": [], **_numbers(arrival, 0)}
        return Response(to_json(empty), media_type="application/json")
    return await run.respond(request)


@router.post(
    "/api/embeddings", response_model=OllamaEmbeddingsAnswer, responses=ERRORS, summary="Ollama's older embeddings"
)
async def embeddings(
    body: Annotated[OllamaEmbeddingsRequest, Body(openapi_examples=examples.OLLAMA_EMBEDDINGS)],
    request: Request,
    service: ServiceDep,
) -> Response:
    """Return the vector of a text as the model gives it, as in Ollama's API."""
    texts = [body.prompt] if body.prompt else []
    run = _run_of(body, texts, PoolingParams(task="embed"), service, time.monotonic(), cut=True, single=True)
    if run is None:
        return Response(b'{"embedding":[]}', media_type="application/json")
    return await run.respond(request)


def _run_of(
    body: OllamaEmbedRequest | OllamaEmbeddingsRequest,
    texts: Sequence[str],
    params: PoolingParams,
    service: Service,
    arrival: float,
    *,
    cut: bool,
    single: bool = False,
) -> _EmbedRun | None:
    """The run of a request; None if it has no texts. Raises ApiError, InvalidRequestError if a field of the body is
    invalid or not supported."""
    model = find_model(service, body.model)
    service.require("/v1/embeddings")
    body.refuse_unsupported()
    info = service.client.info
    resolve_pooling(params, info, prompt_len=1)
    if not texts:
        return None
    name = "prompt" if single else "input"
    terms = {term: getattr(body, term) for term in ("cache_salt", "priority", "request_timeout")}
    return _EmbedRun(
        service,
        valid(EmbeddingRequest, {"input": list(texts), "model": model, **terms}, {"input": name}),
        arrival,
        params=params,
        asked=None,
        prompt=find_prompt(info, None),
        truncate=info.max_model_len if cut else None,
        shape=b"",
        headers=ignored_header(body.ignored_fields()),
        called=body.model or service.model_id,
        single=single,
    )


def _numbers(arrival: float, tokens: int) -> Mapping[str, Any]:
    return {"total_duration": int((time.monotonic() - arrival) * 1e9), "load_duration": 0, "prompt_eval_count": tokens}


@dataclass(slots=True)
class _EmbedRun(MatrixRun):
    id_prefix = "ollama"
    advice = "send truncate: true"
    called: str = field(kw_only=True)  # the name that the client sent
    single: bool = field(kw_only=True)  # the answer is one vector, as in /api/embeddings

    def public_name(self, param: str | None) -> str | None:
        return "prompt" if param == "input" and self.single else param

    def render(self, answers: Sequence[Pooled]) -> bytes:
        written = [json_matrix(answer.values(), rows=False) for answer in answers]
        if self.single:
            return b'{"embedding":%b}' % written[0]
        facts = to_json({"model": self.called, **_numbers(self.arrival, self.num_tokens)})
        return b'%b,"embeddings":[%b]}' % (facts[:-1], b",".join(written))
