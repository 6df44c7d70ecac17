"""The HTTP bodies of vLLM's routes with tokens in and out: /inference/v1/generate, and what /render makes for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from server.api.fields import Name
from server.api.schemas import IDS_SCHEMA, GenerationBody, ServedBody, StreamOptions, Usage


class GenerateRequest(ServedBody):
    """Body of POST /inference/v1/generate. Null means the default, for every field but token_ids."""

    request_id: Name | None = Field(None, description="Returned with the answer.")
    token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True), WithJsonSchema(IDS_SCHEMA)] = Field(
        description="The prompt."
    )
    sampling_params: GenerationBody = Field(
        default_factory=lambda: GenerationBody.model_validate({}),
        description="Sampling fields, as in /v1/completions.",
    )
    model: str | None = Field(None, description="Id of the served model. Optional.")
    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Add the prompt's token ids.")
    output_mode: Literal["tokens", "text"] | None = Field(
        None, description="tokens or text; text adds the text of the tokens (tokens)."
    )
    features: None = Field(None, description="Not supported.")
    content_parts: None = Field(None, description="Not supported.")

    def ignored_fields(self) -> list[str]:
        """Names of unknown fields that might have been meant to change the answer."""
        inner = [f"sampling_params.{name}" for name in self.sampling_params.ignored_fields()]
        return super().ignored_fields() + inner


class RenderedRequest(BaseModel):
    """Answer of POST /v1/chat/completions/render, and of /v1/completions/render for each prompt: a body for
    /inference/v1/generate."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, Any] | None
    return_token_ids: bool | None
    cache_salt: str | None
    priority: int
    request_timeout: float | None


class TokenLogprob(BaseModel):
    """A token by its id."""

    token_id: int
    logprob: float


class TokenLogprobContent(TokenLogprob):
    """A token of the answer, and what was most probable in its place: the token itself first."""

    top_logprobs: list[TokenLogprob]


class TokenLogprobs(BaseModel):
    """One entry per token."""

    content: list[TokenLogprobContent]


class GenerateChoice(BaseModel):
    """One answer, or in a stream one answer's next tokens; `text` only with output_mode text."""

    index: int
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    text: str | None = None


class GenerateResponse(BaseModel):
    """Answer of POST /inference/v1/generate, and one event of its stream."""

    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"]
    choices: list[GenerateChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
