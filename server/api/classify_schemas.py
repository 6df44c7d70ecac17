"""The HTTP bodies of /v1/classify, in vLLM's shape with the names of transformers' pipelines."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from engine.pooled import Aggregation
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


class Pair(tuple[str, str]):
    """Two texts that the model reads as one input."""

    __slots__ = ()


def _check_inputs(value: Any) -> list[str | Pair | list[int]]:
    """Any of the forms, as a list of texts, images, pairs and lists of ids."""
    given = [value] if isinstance(value, str | dict) or is_ids(value) else value
    if isinstance(given, list) and given:
        inputs = [(read_image(item) or _read_pair(item)) if isinstance(item, dict) else item for item in given]
        if all(isinstance(item, str | Pair) for item in inputs) or all(is_ids(item) for item in inputs):
            return check_each(inputs, alone=given is not value)
    raise PydanticCustomError(
        "inputs",
        'must be a string, an object such as {"text": "...", "text_pair": "..."} or {"image": "data:..."}, a list of '
        "these, a list of token ids or a list of such lists, none empty",
    )


def _read_pair(item: dict[Any, Any]) -> str | Pair | None:
    """A pair, or the single text of an object; None if it is neither."""
    text, pair = item.get("text"), item.get("text_pair")
    if not isinstance(text, str) or not isinstance(pair, str | None) or set(item) - {"text", "text_pair"}:
        return None
    if pair == "":
        raise PydanticCustomError("limit", "must not have an empty text_pair; leave it out")
    return text if pair is None else Pair((text, pair)) if text else ""


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
