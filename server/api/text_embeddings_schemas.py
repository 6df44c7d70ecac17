"""The HTTP bodies of text-embeddings-inference's endpoints (its version 1.8)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.api.fields import Name
from server.api.pooling_schemas import TEXT_SCHEMA, Inputs, NumbersBody, check_each, several
from server.api.scoring_schemas import Documents, RerankRequest, Texts


class CutBody(NumbersBody):
    """The common fields of all these bodies. Null means the default."""

    truncate: bool | None = Field(None, description="Cut texts to the model's limit (false).")
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = Field(
        None, description="The side that is cut: only the one on which the model's tokenizer cuts."
    )


class EmbedSparseRequest(CutBody):
    """Body of POST /embed_sparse and /embed_all."""

    inputs: Inputs = Field(description="One or several texts, or token ids.")
    prompt_name: Name | None = Field(
        None, description="The name of a prompt of the model that is put before each text."
    )


class EmbedRequest(EmbedSparseRequest):
    """Body of POST /embed."""

    normalize: bool | None = Field(None, description="Divide each vector by its norm (true).")
    dimensions: int | None = Field(None, ge=1, description="Keep only this many features, the first ones.")


def _check_sequences(value: Any) -> tuple[list[str | tuple[str, str]], bool]:
    """Texts and pairs, and whether there were several: "a" and ["a"] are a text, ["a", "b"] is a pair, and a list of
    such lists contains several inputs."""
    if isinstance(value, str):
        value = [value]
    many = isinstance(value, list) and bool(value) and all(isinstance(item, list) for item in value)
    rows = value if many else [value]
    for row in rows:
        if not isinstance(row, list) or len(row) not in (1, 2) or not all(isinstance(text, str) for text in row):
            message = "must be a text, a list of one or two texts, or a non-empty list of such lists"
            raise PydanticCustomError("texts", message)
    check_each(rows, alone=not many)
    check_each([text for row in rows[:1] for text in row] if not many else [], alone=True)
    return [row[0] if len(row) == 1 else (row[0], row[1]) for row in rows], many


_ROW_SCHEMA: dict[str, Any] = {"type": "array", "minItems": 1, "maxItems": 2, "items": TEXT_SCHEMA}
Sequences = Annotated[
    Any, PlainValidator(_check_sequences), WithJsonSchema({"anyOf": [TEXT_SCHEMA, _ROW_SCHEMA, several(_ROW_SCHEMA)]})
]


class PredictRequest(CutBody):
    """Body of POST /predict."""

    inputs: Sequences = Field(description="A text, a pair of texts as a list of two, or a list of lists of these.")
    raw_scores: bool | None = Field(None, description="Return the head's raw scores (false).")


class SimilarityInput(BaseModel):
    """A sentence, and the sentences to compare it with."""

    source_sentence: str = Field(min_length=1)
    sentences: Texts


class SimilarityParameters(BaseModel):
    """Settings for reading the texts."""

    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    prompt_name: Name | None = None


class SimilarityRequest(NumbersBody):
    """Body of POST /similarity."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class EitherRerankRequest(RerankRequest):
    """Body of POST /rerank: with documents the body of /v1/rerank, with texts that of text-embeddings-inference."""

    documents: Documents | None = None
    texts: Texts | None = Field(None, description="The documents to sort.")
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
