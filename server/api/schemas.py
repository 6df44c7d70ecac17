"""The HTTP bodies, in OpenAI's shapes with vLLM's extra fields; those of chat are in `chat_schemas`.

The sampling fields are made from `SamplingParams` itself (`server.api.fields`), so that a new one needs no
second declaration; values are checked there too, here only their types.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    BaseModel,
    Field,
    PlainValidator,
    WithJsonSchema,
    create_model,
)
from pydantic_core import PydanticCustomError

from engine import MAX_LOGPROBS, SamplingParams
from server.api.base import Body
from server.api.fields import COUNTS_OF_LOGPROBS, ELSEWHERE, Name, at_most, sampling_fields
from server.api.structured import StructuredBody
from server.api.template_fields import TemplateFields

MAX_PROMPTS = 2048  # prompts in one request, as at OpenAI
MAX_MESSAGES = 8192  # in one conversation
MAX_SALT = 256  # characters of a cache_salt
MAX_PRIORITY = 2**31 - 1
MAX_TIMEOUT = 86_400  # seconds


def is_ids(value: Any) -> bool:
    """A list of token ids that is not empty."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _check_prompt(value: Any) -> list[str | list[int]]:
    """Any of the four forms as a list of prompts."""
    prompts = [value] if isinstance(value, str) or is_ids(value) else value
    texts_or_ids = isinstance(prompts, list) and (
        all(isinstance(item, str) for item in prompts) or all(is_ids(item) for item in prompts)
    )
    if not texts_or_ids or not prompts:
        message = "must be a string, a list of strings, a list of token ids or a list of such lists, none empty"
        raise PydanticCustomError("prompt", message)
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError("limit", f"may hold at most {MAX_PROMPTS} prompts, got {len(prompts)}")
    return list(prompts)


IDS_SCHEMA: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        IDS_SCHEMA,
        {"type": "array", "minItems": 1, "items": IDS_SCHEMA},
    ]
}
Prompts = Annotated[Any, PlainValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]


def _check_decoder_prompt(value: Any) -> Any:
    if isinstance(value, str) or is_ids(value):
        return value
    raise PydanticCustomError("decoder_prompt", "must be a string or a list of token ids that is not empty")


DecoderPrompt = Annotated[
    Any, PlainValidator(_check_decoder_prompt), WithJsonSchema({"anyOf": [{"type": "string"}, IDS_SCHEMA]})
]


class ServedBody(Body):
    """What the bodies of all requests share that the engine serves: its terms."""

    cache_salt: str | None = Field(
        None, min_length=1, max_length=MAX_SALT, description="Share cached pages only with requests of the same salt."
    )
    priority: int | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Lower is served earlier (0), among the requests of the same API key.",
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT,
        description="Seconds from the arrival after which the request ends; the header X-Request-Timeout says the "
        "same, and of both the shorter time counts.",
    )


if TYPE_CHECKING:
    _SamplingBody = ServedBody
else:
    _SamplingBody = create_model("SamplingFields", __base__=ServedBody, **sampling_fields())


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool | None = Field(None, description="End the stream with a chunk that holds the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every chunk holds the usage so far."
    )


class GenerationBody(_SamplingBody, StructuredBody):
    """What the bodies of all endpoints that generate text share. Null means the default."""

    model: str | None = Field(None, description="The served model's id; may be left out.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    stream_options: StreamOptions | None = None
    best_of: int | None = Field(None, ge=1, description="Generate that many answers and keep the n most probable.")
    use_beam_search: bool | None = Field(None, description="Beam search with max(n, best_of) beams, at least 2.")
    return_token_ids: bool | None = Field(None, description="Add the token ids of the answers and of the prompt.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name tokens among log-probabilities by their ids, token_id:42, since texts may be alike."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=2**31 - 1,
        description="Keep the last so many tokens of a longer prompt; -1: as many as leave room for the answer.",
    )

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments for `SamplingParams`: the sampling fields that were given."""
        names = {field.name for field in dataclasses.fields(SamplingParams)} & type(self).model_fields.keys()
        given = {name: getattr(self, name) for name in names.difference(ELSEWHERE)}
        given |= {name: MAX_LOGPROBS for name in COUNTS_OF_LOGPROBS if given.get(name) == -1}
        if given.get("logprob_token_ids") and given.get("logprobs") is None:
            given["logprobs"] = 0
        structured = self.structured()
        if structured is not None:
            given["structured_outputs"] = structured
        return {name: value for name, value in given.items() if value is not None}

    def ignored_fields(self) -> list[str]:
        """Names of unknown fields that might have been meant to change the answer."""
        options = self.stream_options.ignored_fields() if self.stream_options is not None else []
        return super().ignored_fields() + [f"stream_options.{name}" for name in options]


class CompletionRequest(GenerationBody):
    """Body of POST /v1/completions. Null means the default, for every field but the prompt."""

    prompt: Prompts = Field(
        description="One prompt or several, as text or as token ids. Encoder-decoder models: the encoder's input."
    )
    echo: bool | None = Field(
        None,
        description="Begin each answer with its prompt. With max_tokens 0 there is nothing after it: with logprobs, "
        "the way to score a text.",
    )
    suffix: Name | None = Field(None, description="Not supported.")
    add_special_tokens: bool | None = Field(
        None, description="Add the special tokens to each text that the tokenizer puts there (true)."
    )
    decoder_prompt: DecoderPrompt | None = Field(
        None, description="Encoder-decoder models: the beginning of the answer, which goes on from there."
    )
    forced_bos_token: Name | int | None = Field(
        None, description="Encoder-decoder models: the answer's first token, as the vocabulary writes it, or its id."
    )
    src_lang: Name | None = Field(None, description="Models with tokens for languages: the prompt's, such as en_XX.")
    tgt_lang: Name | None = Field(None, description="Models with tokens for languages: the answer's, such as de_DE.")


class PromptTokensDetails(BaseModel):
    """Part of `Usage`."""

    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    """Part of `Usage`, where reasoning is told apart: its tokens, with the marks around it."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Tokens of the whole request. Answers that best_of threw away count too."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails | None = None


class CompletionLogprobs(BaseModel):
    """One entry per token. `text_offset` counts characters from the start of the choice's text and is
    approximate where a token holds only part of a character."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer, or in a stream one answer's next piece. `stop_reason` is the stop string or the stop
    token id that ended it, null for the model's own end of sequence. `score` is what a beam search ranks
    its answers by."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, dict[str, float | int | str | None]] | None] | None = None
    score: float | None = None


class BeamMove(BaseModel):
    """A beam goes on with a token, or ends with it. `parent` is its place among the live beams of the step before;
    `score` its log-probability so far, of one that ends its final score."""

    parent: int
    token: str
    score: float


class BeamStep(BaseModel):
    """A step of beam search: the beams that go on, best first, and those that ended."""

    live: list[BeamMove]
    ended: list[BeamMove]


class LiveBeams(BaseModel):
    """Steps of the beam search for a prompt, in a stream with `stream_beams`."""

    prompt: int
    steps: list[BeamStep]


class CompletionResponse(BaseModel):
    """Answer of POST /v1/completions, and one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None
    beams: LiveBeams | None = None


class TokenizeRequest(TemplateFields, Body):
    """Body of POST /tokenize: a prompt, or messages with what the template is given besides."""

    model: str | None = Field(None, description="The served model's id; may be left out.")
    prompt: str | None = Field(None, description="Text, as for /v1/completions.")
    messages: Annotated[list[Any], at_most(MAX_MESSAGES, "messages")] | None = Field(
        None, description="Messages, as for /v1/chat/completions."
    )
    content: str | None = Field(None, description="The name that prompt has for clients of llama.cpp.")
    add_special_tokens: bool | None = Field(None, description="With prompt: add those that open a text (true).")
    return_token_strs: bool | None = Field(None, description="Say how the vocabulary writes each token, too.")
    src_lang: Name | None = Field(None, description="With prompt: its language, as for /v1/completions.")


class TokenizeResponse(BaseModel):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="The served model's id; may be left out.")
    tokens: list[int] = Field(min_length=1, fail_fast=True, description="Token ids, each within the vocabulary.")


class DetokenizeResponse(BaseModel):
    """Answer of POST /detokenize; the text has two names, vLLM's and llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(BaseModel):
    """Answer of GET /tokenizer_info."""

    tokenizer_class: str
    vocab_size: int
    special_tokens: dict[str, str | list[str]] = Field(description="By their names, such as bos_token.")
    chat_template: str | None = Field(description="Of chats without tools, where there is one.")


class VersionResponse(BaseModel):
    """Answer of GET /version."""

    version: str


class LoadResponse(BaseModel):
    """Answer of GET /load."""

    server_load: int


class ServerInfo(BaseModel):
    """Answer of GET /server_info. Of a model that reads inputs whole, block_size and num_blocks are 0."""

    version: str
    model: str
    device: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_beams: int
    block_size: int
    num_blocks: int


class ModelCard(BaseModel):
    """One served model. Of an encoder-decoder model max_model_len bounds the answer, decoder_prompt included."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    max_model_len: int
    max_encoder_len: int | None = Field(None, description="Most tokens of a prompt, for an encoder-decoder model.")
    tasks: list[str] = Field(description="What the model can do.")
    endpoints: list[str] = Field(description="Those that it serves; the others answer 400.")
    inputs: list[str] = Field(description="What it reads: text, image, audio.")
    decoding: dict[str, bool | int | float | str] | None = Field(
        None, description="Parameters that a request may leave out, and their values then, where it writes texts."
    )
    embedding_size: int | None = Field(None, description="Features of its vectors, where it gives any.")
    labels: list[str] | None = Field(None, description="The classes that it tells apart, where it does.")
    catalogues: dict[str, int] | None = Field(
        None, description="Names for `constraint`, and how many titles each has, where there are any."
    )


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]
