"""POST /v1/fill-mask."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response

from engine import DEFAULT_TOP_K, InvalidRequestError, Pooled, PoolingParams, TokenInput
from engine.pooled import longest, mask_positions, masks_of
from engine.text.processor import Encoding
from server.answering.encoding import check_boxes, estimate, need_tokenizer, read_images, read_inputs
from server.answering.endpoints import begin
from server.answering.pooling import PoolingInput, PoolingRun, listed
from server.api import examples
from server.api.fill_mask_schemas import FillMaskRequest, FillMaskResponse
from server.api.reading import StrictJsonRoute
from server.context import ServiceDep
from server.errors import ERROR_RESPONSES, ApiError

MAX_FILLED = 2**20  # maximum tokens of all sequences in one answer: each token comes with the whole input

router = APIRouter(route_class=StrictJsonRoute)


@router.post("/fill-mask", include_in_schema=False)
@router.post(
    "/v1/fill-mask", response_model=FillMaskResponse, responses=ERROR_RESPONSES, summary="Predict masked tokens"
)
async def create_filled_masks(
    body: Annotated[FillMaskRequest, Body(openapi_examples=examples.FILL_MASK)], request: Request, service: ServiceDep
) -> Response:
    """Return the most probable tokens for each mask of each input. Also at /fill-mask."""
    arrival = begin(service, body, "/v1/fill-mask")
    check_boxes(service, body.bbox, body.input)
    truncate = longest(body.truncate_prompt_tokens, service.client.info)
    return await _FillMaskRun(service, body, arrival, truncate=truncate).respond(request)


@dataclass(slots=True)
class _FillMaskRun(PoolingRun):
    id_prefix = "fillmask"
    body: FillMaskRequest
    truncate: int | None = field(kw_only=True)
    sources: list[TokenInput] = field(default_factory=list)

    def size(self) -> int:
        return estimate(self.body.input, self.service.client.info)

    async def inputs(self) -> list[PoolingInput]:
        given, service = self.body.input, self.service
        await read_images(service, given)  # no model here takes boxes: report any
        self.sources = await read_inputs(service, given, truncate=self.truncate, boxes=self.body.bbox)
        places = await asyncio.to_thread(self._places)
        top_k = self.body.top_k or DEFAULT_TOP_K
        self._check_size(places, top_k)
        return [
            PoolingInput(source, PoolingParams(task="fill_mask", positions=masks, top_k=top_k))
            for source, masks in zip(self.sources, places, strict=True)
        ]

    def _encoding(self, source: TokenInput) -> Encoding:
        return replace(Encoding.of_ids(source.token_ids), truncated=len(source.token_ids) == self.truncate)

    def _places(self) -> list[list[int]]:
        """The positions of each input's masks; with several inputs, an error names the input."""
        tokenizer, places = need_tokenizer(self.service, "input"), []
        for index, source in enumerate(self.sources):
            try:
                places.append(mask_positions(self._encoding(source), tokenizer))
            except InvalidRequestError as problem:
                where = f"input[{index}]: " if len(self.sources) > 1 else ""
                raise ApiError(400, f"{where}{problem}", param=problem.param, code=problem.code) from problem
        return places

    def _check_size(self, places: list[list[int]], top_k: int) -> None:
        shown = min(top_k, self.service.client.info.vocab_size)
        sizes = (len(masks) * shown * len(each.token_ids) for masks, each in zip(places, self.sources, strict=True))
        wanted = sum(sizes)
        if wanted > MAX_FILLED:
            message = (
                f"{sum(map(len, places))} masks with {shown} tokens each (top_k) make sequences of {wanted} "
                f"tokens together, but an answer may have at most {MAX_FILLED}. Send fewer inputs, or a smaller top_k."
            )
            raise ApiError(400, message, param="top_k", code="invalid_value")

    def render(self, answers: Sequence[Pooled]) -> bytes:
        return listed(self, (self._item(index, answer) for index, answer in enumerate(answers)))

    def _item(self, index: int, answer: Pooled) -> dict[str, Any]:
        tokenizer = need_tokenizer(self.service, "input")
        return {
            "index": index,
            "masks": [
                [
                    {
                        "token": found.token_id,
                        "token_str": found.token,
                        "score": found.score,
                        "sequence": found.sequence,
                    }
                    for found in row
                ]
                for row in masks_of(answer, self._encoding(self.sources[index]), tokenizer)
            ],
        }
