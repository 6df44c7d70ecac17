"""POST /v1/fill-mask."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Response
from pydantic import BaseModel, Field

from engine import DEFAULT_TOP_K, MAX_TOP_K, InvalidRequestError, Pooled, PoolingParams, TokenInput
from engine.pooled import longest, mask_positions, masks_of
from engine.text.processor import Encoding
from server.answering.encoding import check_boxes, estimate, need_tokenizer, read_images, read_inputs
from server.answering.endpoints import lacks_task
from server.answering.pooling import PoolingInput, PoolingRun, listed
from server.api.examples import example
from server.api.pooling_schemas import BoxedBody, Inputs, ListAnswer
from server.errors import ApiError
from server.routes.task_router import TaskCall, TaskRouter

MAX_FILLED = 2**20  # maximum tokens of all sequences in one answer: each token comes with the whole input
router = TaskRouter("pooling")


class FillMaskRequest(BoxedBody):
    """Body of POST /v1/fill-mask. All fields but input may be null, which means the default."""

    input: Inputs = Field(
        description="A text, a list of token ids, or a list of these. Each must contain the tokenizer's mask token."
    )
    top_k: int | None = Field(
        None, ge=1, le=MAX_TOP_K, description=f"Number of most probable tokens to return per mask ({DEFAULT_TOP_K})."
    )


class FilledMask(BaseModel):
    """A token for a mask: its id, its text, its probability, and the whole input with it in place."""

    token: int
    token_str: str
    score: float
    sequence: str


class FilledMasks(BaseModel):
    """The most probable tokens for each mask of one input, best first; masks in their order."""

    index: int
    masks: list[list[FilledMask]]


class FillMaskResponse(ListAnswer):
    """Answer of POST /v1/fill-mask."""

    data: list[FilledMasks]


_EXAMPLES: dict[str, Any] = {
    "simple": example("One mask", input="Paris is the [MASK] of France.", top_k=3),
    "several": example("Several masks", input=["The [MASK] sat on the [MASK].", "It is [MASK]."]),
}


@router.endpoint(
    "/v1/fill-mask",
    "/fill-mask",
    response_model=FillMaskResponse,
    examples=_EXAMPLES,
    lacks=lacks_task("fill_mask", "predict masked tokens"),
    summary="Predict masked tokens",
)
async def create_filled_masks(call: TaskCall[FillMaskRequest]) -> Response:
    """Return the most probable tokens for each mask of each input. Also at /fill-mask."""
    check_boxes(call.service, call.body.bbox, call.body.input)
    truncate = longest(call.body.truncate_prompt_tokens, call.service.client.info)
    return await call.respond(_FillMaskRun, truncate=truncate)


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
