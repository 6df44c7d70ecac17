"""The HTTP bodies of /v1/embeddings, in OpenAI's shape, and of /pooling, in vLLM's; both with vLLM's extra fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from engine import PoolingMode
from engine.pooled.vectors import EmbedDtype
from server.api.chat_schemas import Messages
from server.api.fields import Name
from server.api.pooling_schemas import BoxedBody, Inputs, ListAnswer, either
from server.api.template_fields import TemplateFields

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]


class MatrixBody(TemplateFields, BoxedBody):
    """The common fields of bodies whose answers are vectors or matrices of numbers."""

    input: Inputs | None = Field(
        None,
        description="One or several inputs: texts, lists of token ids, or images for models that read them (image: a "
        "data: URL or base64; URLs are never fetched).",
    )
    messages: Messages | None = Field(
        None, description="Instead of input: a conversation, which the chat template turns into one text."
    )
    add_generation_prompt: bool | None = Field(
        None, description="With messages: end the prompt with the beginning of an assistant message (false)."
    )
    encoding_format: EncodingFormat | None = Field(
        None,
        description="float: lists of numbers. base64: base64. bytes: the concatenated bytes of all vectors instead "
        "of JSON, described in the header metadata. bytes_only: the same without that header.",
    )
    embed_dtype: EmbedDtype | None = Field(
        None, description="Number format of base64 and bytes: float32 (default), float16 or bfloat16."
    )
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="Byte order of base64 and bytes: little (default, also native) or big."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Shorten vectors to this many dimensions, for models that were trained for it."
    )
    normalize: bool | None = Field(
        None, description="Scale each vector to Euclidean length 1 (default: the model's settings, else true)."
    )
    use_activation: bool | None = Field(
        None, description="For vectors, vLLM's name of normalize. For classes, return probabilities (true)."
    )
    padding: Literal["do_not_pad", "max_length"] | None = Field(
        None,
        description="Models that were trained on texts of a fixed length always pad texts; other models do not "
        "accept max_length.",
    )
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens to each text (true).")

    prompt_name: Name | None = Field(
        None,
        description="Prepend this prompt of the model's sentence-transformers config to each text (default: the "
        "config's default prompt, if any).",
    )

    def normalizes(self) -> bool | None:
        """The normalisation switch, a field with two names. Raises ApiError if the two names have different values."""
        value: bool | None = either(self, "normalize", "use_activation")
        return value


class EmbeddingRequest(MatrixBody):
    """Body of POST /v1/embeddings. Input or messages is required. Null means the default."""

    pooling: PoolingMode | None = Field(
        None, description="How token vectors are combined into one (default: the model's settings)."
    )


class PoolingRequest(MatrixBody):
    """Body of POST /pooling. Input or messages is required. Null means the default."""

    task: Name | Annotated[list[Name], Field(min_length=1, max_length=3)] | None = Field(
        None,
        description="embed: a vector. classify: class scores. token_classify: class scores per token. token_embed: a "
        "vector per token. sparse_embed: token weights. A list requests several kinds of vectors (default: the "
        "model's task).",
    )


class Embedding(BaseModel):
    """One vector: numbers, or base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(ListAnswer):
    """Answer of POST /v1/embeddings."""

    data: list[Embedding]


class SparseValue(BaseModel):
    """The weight of a token in a sparse vector."""

    index: int = Field(description="The token's id.")
    value: float
    token: str | None = Field(None, description="The token as written in the vocabulary.")


class PoolingVectors(BaseModel):
    """Several kinds of vectors for one input, by task."""

    embed: list[float] | None = None
    token_embed: list[list[float]] | None = None
    sparse_embed: list[SparseValue] | None = None


class PoolingItem(BaseModel):
    """The result for one input: numbers, a list per token, or base64."""

    object: str = "pooling"
    index: int
    data: list[list[float]] | list[float] | list[SparseValue] | PoolingVectors | str


class PoolingResponse(ListAnswer):
    """Answer of POST /pooling."""

    data: list[PoolingItem]


BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
