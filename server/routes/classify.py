"""POST /v1/classify, for models that classify texts and for those that classify tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from fastapi import Response
from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from engine import EngineInfo, Pooled, PoolingParams
from engine.pooled import Aggregation, labels_of, longest, spans_of
from engine.text.processor import Encoding, Tokenizer
from server.answering.encoding import Text, check_boxes, compact_input, encode_all, estimate, read_images, read_inputs
from server.answering.endpoints import kind_of
from server.answering.packing import packed, unpacked
from server.answering.pooling import PoolingInput, PoolingRun, image_input, listed
from server.api.examples import example
from server.api.pooling_schemas import (
    IMAGE_SCHEMA,
    TEXT_SCHEMA,
    ActivatedBody,
    BoxedBody,
    ListAnswer,
    check_each,
    either,
    read_image,
    several,
)
from server.api.schemas import IDS_SCHEMA, is_ids
from server.errors import ApiError
from server.routes.task_router import TaskCall, TaskRouter

router = TaskRouter("pooling")


class TextPair(tuple[str, str]):
    """Two texts that the model reads as one input."""

    __slots__ = ()


def _check_inputs(value: Any) -> list[str | TextPair | list[int]]:
    """The inputs as a list of texts, images, pairs and lists of ids."""
    given = [value] if isinstance(value, str | dict) or is_ids(value) else value
    if isinstance(given, list) and given:
        inputs = [(read_image(item) or _read_pair(item)) if isinstance(item, dict) else item for item in given]
        if all(isinstance(item, str | TextPair) for item in inputs) or all(is_ids(item) for item in inputs):
            return check_each(inputs, alone=given is not value)
    raise PydanticCustomError(
        "inputs",
        'must be a string, an object such as {"text": "...", "text_pair": "..."} or {"image": "data:..."}, a list of '
        "these, a list of token ids or a list of such lists, none empty",
    )


def _read_pair(item: dict[Any, Any]) -> str | TextPair | None:
    """The pair or the single text that an object holds; None if it holds neither."""
    text, pair = item.get("text"), item.get("text_pair")
    if not isinstance(text, str) or not isinstance(pair, str | None) or set(item) - {"text", "text_pair"}:
        return None
    if pair == "":
        raise PydanticCustomError("limit", "must not have an empty text_pair; leave it out")
    return text if pair is None else TextPair((text, pair)) if text else ""


_PAIR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"text": TEXT_SCHEMA, "text_pair": {"anyOf": [TEXT_SCHEMA, {"type": "null"}]}},
    "required": ["text"],
    "additionalProperties": False,
}
_INPUTS_SCHEMA = {
    "anyOf": [
        TEXT_SCHEMA,
        _PAIR_SCHEMA,
        IMAGE_SCHEMA,
        several({"anyOf": [TEXT_SCHEMA, _PAIR_SCHEMA, IMAGE_SCHEMA]}),
        IDS_SCHEMA,
        several(IDS_SCHEMA),
    ]
}


class ClassifyRequest(ActivatedBody, BoxedBody):
    """Body of POST /v1/classify. All fields but input may be null, which means the default."""

    input: Annotated[Any, PlainValidator(_check_inputs), WithJsonSchema(_INPUTS_SCHEMA)] = Field(
        description="One or several inputs: texts, pairs of texts (text, text_pair), lists of token ids, or images "
        "for models that read them (image: a data: URL or base64; URLs are never fetched)."
    )
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens to each text (true).")
    top_k: int | None = Field(
        None,
        ge=1,
        description="For models that classify texts: return only this many classes, the most probable ones (all).",
    )
    aggregation: Aggregation | None = Field(
        None,
        description="For models that classify tokens. none: every token is an entity. simple: neighbouring tokens of "
        "an entity are joined. first, average and max also keep words whole; the class of a word is that of its "
        "first token, the average, or that of its most certain token (simple).",
    )
    aggregation_strategy: Aggregation | None = Field(None, description="Name of aggregation in transformers.")

    def aggregates(self) -> Aggregation | None:
        """The aggregation, a field with two names. Raises ApiError if the two names have different values."""
        value: Aggregation | None = either(self, "aggregation", "aggregation_strategy")
        return value


class ClassScore(BaseModel):
    """A class with its score."""

    label: str
    score: float


class Classification(BaseModel):
    """The classes of one input: `label` is the best one, `probs` lists all in the order of the model's config, `scores`
    lists them best first."""

    index: int
    label: str
    probs: list[float]
    num_classes: int
    scores: list[ClassScore]


class Entity(BaseModel):
    """A part of an input that has one class. `start` and `end` (exclusive) count characters (Unicode code points), or
    tokens if the input was token ids. They are null if the tokenizer does not report positions."""

    label: str
    score: float
    start: int | None
    end: int | None
    text: str


class TokenClassification(BaseModel):
    """The entities of one input, in order."""

    index: int
    entities: list[Entity]


class ClassifyResponse(ListAnswer):
    """Answer of POST /v1/classify. The kind of data depends on the model."""

    data: list[Classification] | list[TokenClassification]


_EXAMPLES: dict[str, Any] = {
    "simple": example("Two texts", input=["What a fine day!", "The train was late again."]),
    "pair": example(
        "Two texts that are read together",
        input={"text": "A cat sat on the mat.", "text_pair": "An animal was sitting."},
    ),
    "entities": example("Models that classify tokens: entities", input="Anna Bergen lives in Oslo."),
}


_NEEDS_TEXT = ("first", "average", "max")  # aggregations that work on words


def _lacks(info: EngineInfo, tokenizer: Tokenizer | None) -> str | None:
    return None if {"classify", "token_classify"} & set(info.tasks) else f"{kind_of(info)}, and it has no classes"


@router.endpoint(
    "/v1/classify",
    "/classify",
    response_model=ClassifyResponse,
    examples=_EXAMPLES,
    lacks=_lacks,
    summary="Classify texts or images",
)
async def create_classification(call: TaskCall[ClassifyRequest]) -> Response:
    """Return the classes of each input, or its entities if the model classifies tokens. Also at /classify."""
    info, body = call.service.client.info, call.body
    check_boxes(call.service, body.bbox, body.input)
    run = _TokenRun if "token_classify" in info.tasks else _TextRun
    truncate = longest(body.truncate_prompt_tokens, info)
    return await call.respond(run, truncate=truncate, use_activation=body.activates())


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
        if any(isinstance(item, TextPair) for item in self.body.input):
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
