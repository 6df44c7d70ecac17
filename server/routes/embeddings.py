"""POST /v1/embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from engine import Pooled, PoolingParams, TokenInput, resolve_pooling
from engine.pooled import find_prompt, longest, prompt_tokens
from engine.pooled.vectors import json_vectors
from server.answering.encoding import estimate, need_tokenizer, read_images, read_inputs
from server.answering.endpoints import require
from server.answering.pooling import PoolingInput, PoolingRun, image_input, joined
from server.api import examples
from server.api.embedding_schemas import EmbeddingRequest, EmbeddingResponse
from server.api.pooling_schemas import Image
from server.api.reading import StrictJsonRoute
from server.context import ServiceDep
from server.errors import ERROR_RESPONSES, ApiError

router = APIRouter(route_class=StrictJsonRoute)


@router.post("/embeddings", include_in_schema=False)
@router.post(
    "/v1/embeddings", response_model=EmbeddingResponse, responses=ERROR_RESPONSES, summary="Texts and images to vectors"
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
    params = PoolingParams(task="embed", pooling=body.pooling, normalize=body.normalize, dimensions=body.dimensions)
    resolve_pooling(params, info, prompt_len=1)  # what is impossible is said before any work
    run = _EmbeddingRun(
        service,
        body,
        arrival,
        params=params,
        prompt=find_prompt(info, body.prompt_name),
        truncate=longest(body.truncate_prompt_tokens, info),
    )
    if body.prompt_name is not None and not run.texts:
        message = "prompt_name goes with texts: token ids are taken as they are. Put the prompt's tokens among them."
        raise ApiError(400, message, param="prompt_name", code="invalid_value")
    return await run.respond(request)


@dataclass(slots=True)
class _EmbeddingRun(PoolingRun):
    """One request for vectors.

    Attributes:
        params: of all inputs, but for the prompt's tokens.
        prompt: stands in front of each text.
        truncate: how many tokens an input is cut to, if it is.
    """

    id_prefix = "embd"
    body: EmbeddingRequest
    params: PoolingParams = field(kw_only=True)
    prompt: str = field(kw_only=True)
    truncate: int | None = field(kw_only=True)

    @property
    def texts(self) -> bool:
        """There are texts among the inputs."""
        return any(isinstance(item, str) and not isinstance(item, Image) for item in self.body.input)

    def size(self) -> int:
        return estimate(self.body.input, self.service.client.info)

    async def inputs(self) -> Sequence[PoolingInput]:
        special, info = self.body.add_special_tokens is not False, self.service.client.info
        images = await read_images(self.service, self.body.input)
        others = [item for item in self.body.input if not isinstance(item, Image)]
        params, read = self.params, list[TokenInput]()
        if others:
            read = await read_inputs(
                self.service, others, add_special_tokens=special, truncate=self.truncate, prompt=self.prompt
            )
        if self.texts:
            tokenizer = need_tokenizer(self.service, "input")
            count = prompt_tokens(tokenizer, info, self.prompt, add_special_tokens=special)
            params = replace(params, skip_tokens=count)
        rest = iter(read)
        return [
            image_input(images[place], self.params, info) if place in images else PoolingInput(next(rest), params)
            for place in range(len(self.body.input))
        ]

    def render(self, answers: Sequence[Pooled]) -> bytes:
        written = json_vectors(answers, as_base64=self.body.encoding_format == "base64")
        items = (b'{"object":"embedding","index":%d,"embedding":%b}' % entry for entry in enumerate(written))
        return joined(self, items)
