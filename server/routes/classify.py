"""POST /v1/classify, for models that classify texts and for those that classify tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Body, Request, Response

from engine import Pooled, PoolingParams
from engine.pooled import Aggregation, labels_of, longest, spans_of
from engine.text.processor import Encoding
from server.answering.encoding import Text, check_boxes, compact_input, encode_all, estimate, read_images, read_inputs
from server.answering.endpoints import begin
from server.answering.packing import packed, unpacked
from server.answering.pooling import PoolingInput, PoolingRun, image_input, listed
from server.api import examples
from server.api.classify_schemas import ClassifyRequest, ClassifyResponse, Pair
from server.api.reading import StrictJsonRoute
from server.context import ServiceDep
from server.errors import ERROR_RESPONSES, ApiError

router = APIRouter(route_class=StrictJsonRoute)

_NEEDS_TEXT = ("first", "average", "max")  # aggregations that work on words


@router.post("/classify", include_in_schema=False)
@router.post(
    "/v1/classify", response_model=ClassifyResponse, responses=ERROR_RESPONSES, summary="Classify texts or images"
)
async def create_classification(
    body: Annotated[ClassifyRequest, Body(openapi_examples=examples.CLASSIFY)], request: Request, service: ServiceDep
) -> Response:
    """Return the classes of each input, or its entities if the model classifies tokens. Also at /classify."""
    arrival = begin(service, body, "/v1/classify")
    check_boxes(service, body.bbox, body.input)
    run = _TokenRun if "token_classify" in service.client.info.tasks else _TextRun
    truncate = longest(body.truncate_prompt_tokens, service.client.info)
    return await run(service, body, arrival, truncate=truncate, use_activation=body.activates()).respond(request)


@dataclass(slots=True)
class _ClassifyRun(PoolingRun):
    """`encodings` has the packed encodings of texts if `keeps_encodings` is set."""

    id_prefix = "classify"
    keeps_encodings: ClassVar[bool] = False
    body: ClassifyRequest
    truncate: int | None = field(kw_only=True)
    use_activation: bool | None = field(kw_only=True)
    encodings: list[bytes] = field(default_factory=list)

    def size(self) -> int:
        return estimate(self.body.input, self.service.client.info)

    async def read(self, params: PoolingParams) -> list[PoolingInput]:
        images = await read_images(self.service, self.body.input)
        if images:
            info = self.service.client.info
            if len(images) < len(self.body.input):
                message = f"{self.service.model_id} only classifies images; send no texts among them."
                raise ApiError(400, message, param="input", code="unsupported_input")
            return [image_input(image, params, info) for image in images.values()]
        if isinstance(self.body.input[0], list):
            sources = await read_inputs(self.service, self.body.input, truncate=self.truncate, boxes=self.body.bbox)
            return [PoolingInput(source, params) for source in sources]

        def kept(encoding: Encoding, item: Text) -> PoolingInput:
            if self.keeps_encodings:
                self.encodings.append(packed(encoding))
            return PoolingInput(compact_input(self.service, encoding, item), params)

        special = self.body.add_special_tokens is not False
        return await encode_all(self.service, self.body.input, kept, add_special_tokens=special, truncate=self.truncate)


@dataclass(slots=True)
class _TextRun(_ClassifyRun):
    async def inputs(self) -> list[PoolingInput]:
        for name in ("aggregation", "aggregation_strategy"):
            if getattr(self.body, name) is not None:
                raise _refusal(name, "a model that classifies tokens, but this model classifies texts")
        return await self.read(PoolingParams(task="classify", use_activation=self.use_activation))

    def render(self, answers: Sequence[Pooled]) -> bytes:
        return listed(self, (self._item(index, answer) for index, answer in enumerate(answers)))

    def _item(self, index: int, answer: Pooled) -> dict[str, Any]:
        classes = labels_of(answer, self.service.client.info)
        ranked = sorted(classes, key=lambda found: -found.score)
        return {
            "index": index,
            "label": ranked[0].label,
            "probs": [found.score for found in classes],
            "num_classes": len(classes),
            "scores": [{"label": found.label, "score": found.score} for found in ranked[: self.body.top_k]],
        }


@dataclass(slots=True)
class _TokenRun(_ClassifyRun):
    keeps_encodings = True
    aggregation: Aggregation = "simple"

    async def inputs(self) -> list[PoolingInput]:
        if self.body.top_k is not None:
            raise _refusal("top_k", "a model that classifies texts, but this model classifies tokens")
        self.aggregation = self.body.aggregates() or "simple"
        if isinstance(self.body.input[0], list) and self.aggregation in _NEEDS_TEXT:
            message = (
                f"aggregation {self.aggregation!r} needs words, which token ids do not have. Send text, or use simple."
            )
            raise ApiError(400, message, param="aggregation", code="invalid_value")
        if any(isinstance(item, Pair) for item in self.body.input):
            message = f"{self.service.model_id} classifies the tokens of a single text. Remove text_pair."
            raise ApiError(400, message, param="input", code="unsupported_parameter")
        return await self.read(PoolingParams(task="token_classify", use_activation=self.use_activation))

    def render(self, answers: Sequence[Pooled]) -> bytes:
        return listed(self, (self._item(index, answer) for index, answer in enumerate(answers)))

    def _item(self, index: int, answer: Pooled) -> dict[str, Any]:
        given, service = self.body.input[index], self.service
        text = given if isinstance(given, str) else None
        encoding = self._of_ids(given) if text is None else unpacked(self.encodings[index], Encoding)
        spans = spans_of(answer, encoding, text, service.tokenizer, service.client.info, self.aggregation)
        return {
            "index": index,
            "entities": [
                {"label": span.label, "score": span.score, "start": span.start, "end": span.end, "text": span.text}
                for span in spans
            ],
        }

    def _of_ids(self, given: Sequence[int]) -> Encoding:
        """An input that came as ids: positions count tokens, and special tokens belong to no text."""
        tokenizer = self.service.tokenizer
        added = frozenset[int]() if tokenizer is None else tokenizer.frame_ids
        side = "right" if tokenizer is None else tokenizer.truncation_side
        encoding = Encoding.of_ids(given, self.truncate, side, added=added)
        return replace(encoding, offsets=[(at, at + 1) for at in range(len(encoding.ids))], truncated=False)


def _refusal(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name} is only for {why}. Remove it.", param=name, code="unsupported_parameter")
