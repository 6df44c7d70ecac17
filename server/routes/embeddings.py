"""POST /v1/embeddings."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from engine import Pooled, PoolingParams, resolve_pooling
from engine.pooled import json_vectors, longest
from server.answering.encoding import estimate, read_inputs
from server.answering.endpoints import require
from server.answering.pooling import PoolingInput, PoolingRun
from server.api import examples
from server.api.pooling_schemas import EmbeddingRequest, EmbeddingResponse
from server.api.schemas import StrictJsonRoute
from server.context import ServiceDep
from server.errors import ERROR_RESPONSES

router = APIRouter(route_class=StrictJsonRoute)


@router.post("/v1/embeddings", response_model=EmbeddingResponse, responses=ERROR_RESPONSES, summary="Texts to vectors")
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
    params = PoolingParams(task="embed", pooling=body.pooling, normalize=body.normalize, dimensions=body.dimensions)
    resolve_pooling(params, service.client.info, prompt_len=1)  # what is impossible is said before any work
    truncate = longest(body.truncate_prompt_tokens, service.client.info)
    return await _EmbeddingRun(service, body, arrival, params=params, truncate=truncate).respond(request)


@dataclass(slots=True)
class _EmbeddingRun(PoolingRun):
    id_prefix = "embd"
    body: EmbeddingRequest
    params: PoolingParams = field(kw_only=True)
    truncate: int | None = field(kw_only=True)

    def size(self) -> int:
        return estimate(self.body.input, self.service.client.info)

    async def inputs(self) -> Sequence[PoolingInput]:
        special = self.body.add_special_tokens is not False
        inputs = await read_inputs(self.service, self.body.input, add_special_tokens=special, truncate=self.truncate)
        return [PoolingInput(source, self.params) for source in inputs]

    def render(self, answers: Sequence[Pooled]) -> bytes:
        written = json_vectors(answers, as_base64=self.body.encoding_format == "base64")
        data = b",".join(b'{"object":"embedding","index":%d,"embedding":%b}' % entry for entry in enumerate(written))
        rest = {
            "id": self.request_id,
            "object": "list",
            "created": self.created,
            "model": self.service.model_id,
            "usage": self.usage.model_dump(),
        }
        return b'%b,"data":[%b]}' % (json.dumps(rest, separators=(",", ":"))[:-1].encode(), data)
