"""The HTTP body of /v2/embed, which is Cohere's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from server.api.pooling_schemas import NumbersBody
from server.api.scoring_schemas import Texts

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
InputType = Literal["search_document", "search_query", "classification", "clustering", "image"]
MAX_IMAGES = 96  # texts or images in one request, as at Cohere


class CohereEmbedRequest(NumbersBody):
    """Body of POST /v2/embed. Null means the default."""

    texts: Texts | None = Field(None, description="The texts to embed.")
    images: list[Annotated[str, Field(min_length=1)]] | None = Field(
        None, min_length=1, max_length=MAX_IMAGES, description="Images as data: URLs, for models that read them."
    )
    input_type: InputType | None = Field(
        None,
        description="Chooses the model's prompt: query, document, classification or clustering, if the model "
        "has that one.",
    )
    embedding_types: list[EmbeddingType] | None = Field(
        None, min_length=1, max_length=6, description="Number formats of the vectors in the answer (float)."
    )
    output_dimension: int | None = Field(None, ge=1, description="Keep only this many features, the first ones.")
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None,
        description="Where to cut long texts: NONE (not at all), or the side on which the model's tokenizer cuts "
        "(END).",
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Cut each text to this many tokens; if truncate is NONE, refuse longer texts."
    )
