"""The HTTP bodies of /v1/embeddings, in OpenAI's shape with vLLM's extra fields."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from engine import PoolingMode
from server.api.fields import Name
from server.api.pooling_schemas import Inputs, PoolingBody, PoolingUsage


class EmbeddingRequest(PoolingBody):
    """Body of POST /v1/embeddings. Null means the default, for every field but the input."""

    input: Inputs = Field(
        description="One input or several: text, token ids, which are taken as they are, or, of models that read them, "
        "images (image: a data: URL or base64; no address is ever fetched)."
    )
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
    prompt_name: Name | None = Field(
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
