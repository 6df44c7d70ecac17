"""The HTTP bodies of vLLM's routes with tokens in and out: /inference/v1/generate, and the bodies that /render makes
for it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from engine import MAX_LISTED_IDS, ReasoningBudget
from server.api.base import JsonBody
from server.api.fields import Name, at_most
from server.api.schemas import IDS_SCHEMA, GenerationBody, ServedBody, StreamOptions, Usage

_Ids = Annotated[list[int], Field(fail_fast=True), at_most(MAX_LISTED_IDS, "token ids"), WithJsonSchema(IDS_SCHEMA)]
# Fields of sampling_params that apply if the outer body lacks them.
_TERMS = tuple(ServedBody.model_fields)
# Fields of sampling_params without effect: the outer body sets them, or the answer cannot contain their result.
_NO_EFFECT = (
    "model", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids", "timings",
    "timings_per_token",
)  # fmt: skip


class RenderedBudget(JsonBody):
    """A limit on the answer's reasoning, as /v1/chat/completions/render writes it."""

    tokens: int = Field(ge=0, le=2**31 - 1, description="Maximum tokens of reasoning.")
    open: _Ids = Field(min_length=1, description="The tokens of the mark before the reasoning.")
    close: int = Field(ge=0, description="The token of the mark after the reasoning.")
    last_words: _Ids | None = Field(None, description="Tokens that are inserted before the closing mark at the limit.")
    begun: bool | None = Field(None, description="Whether the prompt opens the reasoning (false).")

    def made(self) -> ReasoningBudget:
        """The limit in the engine's form. Raises InvalidRequestError if a token id is out of range, or there are too
        many."""
        return ReasoningBudget(
            tokens=self.tokens,
            open=tuple(self.open),
            close=self.close,
            last_words=tuple(self.last_words or ()),
            begun=bool(self.begun),
        )


class GenerateParams(GenerationBody):
    """Part of `GenerateRequest`: the sampling fields of /v1/completions, and a rendered reasoning budget."""

    reasoning_budget: RenderedBudget | None = Field(
        None, description="Limit of the reasoning, as /v1/chat/completions/render writes it."
    )

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments for `SamplingParams`."""
        budget = {} if self.reasoning_budget is None else {"reasoning_budget": self.reasoning_budget.made()}
        return super().sampling() | budget

    def ignored_fields(self) -> list[str]:
        """Names of fields without effect."""
        unused = [name for name in _NO_EFFECT if getattr(self, name) not in (None, False)]
        inner = self.reasoning_budget.ignored_fields() if self.reasoning_budget is not None else []
        return [*super().ignored_fields(), *unused, *(f"reasoning_budget.{name}" for name in inner)]


class GenerateRequest(ServedBody):
    """Body of POST /inference/v1/generate. Null means the default, for every field but token_ids."""

    request_id: Name | None = Field(None, description="Returned with the answer.")
    token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True), WithJsonSchema(IDS_SCHEMA)] = Field(
        description="The prompt."
    )
    sampling_params: GenerateParams = Field(
        default_factory=lambda: GenerateParams.model_validate({}), description="Sampling fields, as in /v1/completions."
    )
    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Add the prompt's token ids.")
    output_mode: Literal["tokens", "text"] | None = Field(
        None, description="tokens or text; text adds the text of the tokens (tokens)."
    )
    features: None = Field(None, description="Not supported.")
    content_parts: None = Field(None, description="Not supported.")

    def asked(self) -> GenerateParams:
        """The sampling parameters with the outer fields. The outer cache_salt, priority and request_timeout take
        precedence over those in sampling_params."""
        params = self.sampling_params
        outer = {name: getattr(self, name) for name in ("stream", "stream_options")}
        terms = {name: getattr(self, name) for name in _TERMS if getattr(self, name) is not None}
        return params.model_copy(update=outer | terms)

    def ignored_fields(self) -> list[str]:
        """Names of unknown fields that the client may have expected to change the answer."""
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
    """A token named by its id."""

    token_id: int
    logprob: float


class TokenLogprobContent(TokenLogprob):
    """A token of the answer, and the most probable tokens at its position: the token itself first."""

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
    prompt_logprobs: list[dict[int, dict[str, float | int | str | None]] | None] | None = None
