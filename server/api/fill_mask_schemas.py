"""The HTTP bodies of /v1/fill-mask; the values are those of transformers' fill-mask pipeline."""

from __future__ import annotations

from pydantic import BaseModel, Field

from engine import DEFAULT_TOP_K, MAX_TOP_K
from server.api.pooling_schemas import BoxedBody, Inputs, ListAnswer


class FillMaskRequest(BoxedBody):
    """Body of POST /v1/fill-mask. All fields but input may be null, which means the default."""

    input: Inputs = Field(
        description="A text, a list of token ids, or a list of these. Each must contain the tokenizer's mask token."
    )
    top_k: int | None = Field(
        None, ge=1, le=MAX_TOP_K, description=f"Number of most probable tokens to return per mask ({DEFAULT_TOP_K})."
    )


class FilledMask(BaseModel):
    """A token for a mask: its id, its text, its probability, and the whole input with it in place."""

    token: int
    token_str: str
    score: float
    sequence: str


class FilledMasks(BaseModel):
    """The most probable tokens for each mask of one input, best first; masks in their order."""

    index: int
    masks: list[list[FilledMask]]


class FillMaskResponse(ListAnswer):
    """Answer of POST /v1/fill-mask."""

    data: list[FilledMasks]
