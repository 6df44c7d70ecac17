"""The HTTP bodies of /v1/embeddings, in OpenAI's shape, and of /pooling, in vLLM's; both with vLLM's extra fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from engine import PoolingMode
from engine.pooled.vectors import EmbedDtype
from server.api.chat_schemas import Messages
from server.api.fields import Name
from server.api.pooling_schemas import BoxedBody, Inputs, PoolingUsage, either
from server.api.template_fields import TemplateFields

EncodingFormat = Literal["float", "base64", "bytes", "bytes_only"]


class MatrixBody(TemplateFields, BoxedBody):
    """What the bodies share whose answers are vectors or matrices of numbers."""

    input: Inputs | None = Field(
        None,
        description="One input or several: text, token ids, which are taken as they are, or, of models that read them, "
        "images (image: a data: URL or base64; no address is ever fetched).",
    )
    messages: Messages | None = Field(
        None, description="In place of input: a conversation, which the model's chat template makes one text of."
    )
    add_generation_prompt: bool | None = Field(None, description="With messages: open the assistant's answer (false).")
    encoding_format: EncodingFormat | None = Field(
        None,
        description="A list of numbers (float), base64, or in place of JSON the bytes of all answers one after the "
        "other, with what they are in the header metadata (bytes) or without (bytes_only).",
    )
    embed_dtype: EmbedDtype | None = Field(
        None, description="What base64 and bytes hold: float32 (the default), float16 or bfloat16."
    )
    endianness: Literal["native", "little", "big"] | None = Field(
        None, description="The order of a number's bytes in base64 and bytes: little (the default, also native) or big."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Keep the first so many features, for models that were trained for that."
    )
    normalize: bool | None = Field(
        None, description="Divide each vector by its Euclidean norm (as the model's own settings say, else true)."
    )
    use_activation: bool | None = Field(
        None, description="Of vectors vLLM's name of normalize; of classes whether they are probabilities (true)."
    )
    padding: Literal["do_not_pad", "max_length"] | None = Field(
        None,
        description="Models that were trained on texts of one length fill texts up in any case; others take no "
        "max_length.",
    )
    add_special_tokens: bool | None = Field(
        None, description="Add the special tokens to each text that the tokenizer puts there (true)."
    )

    prompt_name: Name | None = Field(
        None,
        description="Put that prompt of the model's sentence-transformers config in front of each text (its default "
        "one, if it has one).",
    )

    def normalizes(self) -> bool | None:
        """What the two names of it say.

        Raises:
            ApiError: they contradict each other.
        """
        value: bool | None = either(self, "normalize", "use_activation")
        return value


class EmbeddingRequest(MatrixBody):
    """Body of POST /v1/embeddings. Null means the default, for every field; input or messages must be there."""

    pooling: PoolingMode | None = Field(
        None, description="How a vector is made of the tokens' (as the model's own settings say)."
    )


class PoolingRequest(MatrixBody):
    """Body of POST /pooling. Null means the default, for every field; input or messages must be there."""

    task: Name | Annotated[list[Name], Field(min_length=1, max_length=3)] | None = Field(
        None,
        description="embed: a vector; classify: numbers of the classes; token_classify: those of each token; "
        "token_embed: a vector of each token; sparse_embed: weights of tokens (what the model is made for). A list "
        "asks for several kinds of vectors.",
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


class SparseValue(BaseModel):
    """The weight of a token in a sparse vector."""

    index: int = Field(description="The token's id.")
    value: float
    token: str | None = Field(None, description="The token, as the vocabulary has it.")


class PoolingVectors(BaseModel):
    """Several kinds of vectors of one input, by their tasks' names."""

    embed: list[float] | None = None
    token_embed: list[list[float]] | None = None
    sparse_embed: list[SparseValue] | None = None


class PoolingItem(BaseModel):
    """What was asked of one input: numbers, of each token a list where each has its own, or base64."""

    object: str = "pooling"
    index: int
    data: list[list[float]] | list[float] | list[SparseValue] | PoolingVectors | str


class PoolingResponse(BaseModel):
    """Answer of POST /pooling."""

    id: str
    object: str = "list"
    data: list[PoolingItem]
    created: int
    model: str
    usage: PoolingUsage


BYTES: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
