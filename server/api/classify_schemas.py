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
    PoolingUsage,
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
    """Any of the forms as a list of texts, images, pairs and lists of ids."""
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
    """A pair, or the one text of an object; None where it is neither."""
    text, pair = item.get("text"), item.get("text_pair")
    if not isinstance(text, str) or not isinstance(pair, str | None) or set(item) - {"text", "text_pair"}:
        return None
    if pair == "":
        raise PydanticCustomError("limit", "may hold no empty text_pair; leave it out")
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
    """Body of POST /v1/classify. Null means the default, for every field but input."""

    input: Annotated[Any, PlainValidator(_check_inputs), WithJsonSchema(_INPUTS_SCHEMA)] = Field(
        description="One input or several: text, two texts that the model reads as a pair (text, text_pair), token "
        "ids, which are taken as they are, or, of models that read them, images (image: a data: URL or base64; no "
        "address is ever fetched)."
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the special tokens to each text that the tokenizer puts there (true)."
    )
    top_k: int | None = Field(
        None, ge=1, description="Models that classify texts: name only so many of the most probable classes (all)."
    )
    aggregation: Aggregation | None = Field(
        None,
        description="Models that classify tokens: none, every token is an entity; simple, neighbours of one entity are "
        "joined; first, average and max also keep words whole, by the class of their first token, the classes' "
        "averages, or their surest token (simple).",
    )
    aggregation_strategy: Aggregation | None = Field(None, description="transformers' name of aggregation.")

    def aggregates(self) -> Aggregation | None:
        """What the two names say.

        Raises:
            ApiError: they contradict each other.
        """
        value: Aggregation | None = either(self, "aggregation", "aggregation_strategy")
        return value


class ClassScore(BaseModel):
    """A class by its name."""

    label: str
    score: float


class Classification(BaseModel):
    """One input's classes: `label` names the best one, `probs` holds all in the order of the model's config, `scores`
    the best first."""

    index: int
    label: str
    probs: list[float]
    num_classes: int
    scores: list[ClassScore]


class Entity(BaseModel):
    """A part of an input of one class. `start` and `end` (exclusive) count characters of the text (Unicode code
    points), or tokens where the input came as token ids; null where the model's tokenizer does not say."""

    label: str
    score: float
    start: int | None
    end: int | None
    text: str


class TokenClassification(BaseModel):
    """One input's entities, in their order."""

    index: int
    entities: list[Entity]


class ClassifyResponse(BaseModel):
    """Answer of POST /v1/classify; the model decides which kind of data."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification] | list[TokenClassification]
    usage: PoolingUsage
