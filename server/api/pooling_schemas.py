"""The HTTP bodies of endpoints that answer with numbers, in OpenAI's shapes with vLLM's extra fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from engine import PoolingMode
from server.api.schemas import IDS_SCHEMA, Body, is_ids
from server.errors import ApiError

MAX_INPUTS = 2048  # in one request, as at OpenAI

_MESSAGES = "messages is not supported here; send input, as text that is ready for the model."


class PoolingBody(Body):
    """What the bodies of all these endpoints share. Null means the default."""

    model: str | None = Field(None, description="The served model's id; may be left out.")
    truncate_prompt_tokens: int | None = Field(
        None,
        description="Cut each input to so many tokens, special ones included; -1: to the longest that the model takes. "
        "Without it a longer one is refused.",
    )

    def refuse_unsupported(self) -> None:
        """Refuse fields that would change the answer and are not supported.

        Raises:
            ApiError: names the first one.
        """
        extra = self.model_extra or {}
        if extra.get("messages") is not None:
            raise ApiError(400, _MESSAGES, param="messages", code="unsupported_parameter")
        Body.refuse_unsupported(self)


class PoolingUsage(BaseModel):
    """Tokens of all inputs, special ones included."""

    prompt_tokens: int
    total_tokens: int


def _check_input(value: Any) -> list[str | list[int]]:
    """Any of the four forms as a list of inputs."""
    inputs = [value] if isinstance(value, str) or is_ids(value) else value
    if isinstance(inputs, list) and inputs:
        if len(inputs) > MAX_INPUTS:
            raise PydanticCustomError("limit", f"may hold at most {MAX_INPUTS} inputs, got {len(inputs)}")
        empty = next((place for place, item in enumerate(inputs) if item in ("", [])), None)
        if empty is not None:
            where = "" if inputs == [value] else f": item {empty} is"
            raise PydanticCustomError("limit", f"must not be empty{where}")
        if all(isinstance(item, str) for item in inputs) or all(is_ids(item) for item in inputs):
            return list(inputs)
    message = "must be a string, a list of strings, a list of token ids or a list of such lists, none empty"
    raise PydanticCustomError("input", message)


_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_INPUT_SCHEMA = {
    "anyOf": [
        _TEXT_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": _TEXT_SCHEMA},
        IDS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS, "items": IDS_SCHEMA},
    ]
}
Inputs = Annotated[Any, PlainValidator(_check_input), WithJsonSchema(_INPUT_SCHEMA)]


class EmbeddingRequest(PoolingBody):
    """Body of POST /v1/embeddings. Null means the default, for every field but the input."""

    input: Inputs = Field(description="One input or several, as text or as token ids. Ids are taken as they are.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="A list of numbers (float), or base64 of float32 in little-endian order."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Keep the first so many features, for models that were trained for that."
    )
    normalize: bool | None = Field(
        None, description="Divide each vector by its Euclidean norm (as the model's own settings say, else true)."
    )
    pooling: PoolingMode | None = Field(
        None, description="How a vector is made of the tokens' (as the model's own settings say)."
    )
    prompt_name: str | None = Field(
        None,
        description="Put that prompt of the model's sentence-transformers config in front of each text (its default "
        "one, if it has one).",
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the special tokens to each text that the tokenizer puts there (true)."
    )


class Embedding(BaseModel):
    """One vector: numbers, or base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    """Answer of POST /v1/embeddings."""

    id: str
    object: str = "list"
    data: list[Embedding]
    created: int
    model: str
    usage: PoolingUsage
