"""The HTTP bodies in OpenAI's shapes with vLLM's extra fields; those of chat are in `chat_schemas`.

The sampling fields are derived from `SamplingParams` (`server.api.fields`), so a new one needs no second declaration.
`SamplingParams` checks values; this module checks only types.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError

from engine import MAX_LOGPROBS, MAX_PRIORITY, SamplingParams
from server.api.base import JsonBody
from server.api.fields import COUNTS_OF_LOGPROBS, ELSEWHERE, Name, at_most, sampling_fields
from server.api.structured import StructuredBody
from server.api.template_fields import TemplateFields

MAX_PROMPTS = 2048  # maximum prompts in one request, as at OpenAI
MAX_MESSAGES = 8192  # maximum messages in one conversation
MAX_SALT = 256  # maximum characters of a cache_salt
MAX_TIMEOUT = 86_400  # seconds


def is_ids(value: Any) -> bool:
    """Whether the value is a non-empty list of token ids."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _check_prompt(value: Any) -> list[str | list[int]]:
    prompts = [value] if isinstance(value, str) or is_ids(value) else value
    texts_or_ids = isinstance(prompts, list) and (
        all(isinstance(item, str) for item in prompts) or all(is_ids(item) for item in prompts)
    )
    if not texts_or_ids or not prompts:
        message = (
            "must be a string, a list of strings, a list of token ids or a list of such lists, and none may be empty"
        )
        raise PydanticCustomError("prompt", message)
    if len(prompts) > MAX_PROMPTS:
        raise PydanticCustomError("limit", f"may have at most {MAX_PROMPTS} prompts, got {len(prompts)}")
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
    raise PydanticCustomError("decoder_prompt", "must be a string or a non-empty list of token ids")


DecoderPrompt = Annotated[
    Any, PlainValidator(_check_decoder_prompt), WithJsonSchema({"anyOf": [{"type": "string"}, IDS_SCHEMA]})
]


class ServedBody(JsonBody):
    """The common fields of all requests that the engine serves: the request's terms."""

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_SALT,
        description="Share cached prompts only with requests that have the same salt.",
    )
    priority: int | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Requests with a lower number are served first, among those of the same API key (0).",
    )
    request_timeout: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT,
        description="Time limit in seconds, counted from arrival. The header X-Request-Timeout does the same; the "
        "shorter limit applies.",
    )


if TYPE_CHECKING:
    _SamplingBody = ServedBody
else:
    _SamplingBody = create_model("SamplingFields", __base__=ServedBody, **sampling_fields())


class StreamOptions(JsonBody):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="End the stream with a chunk that contains the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every chunk contains the usage so far."
    )


class GenerationBody(_SamplingBody, StructuredBody):
    """The common fields of all endpoints that generate text. Null means the default."""

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    stream_options: StreamOptions | None = None
    best_of: int | None = Field(
        None, ge=1, description="Generate this many answers and return the n most probable ones."
    )
    use_beam_search: bool | None = Field(None, description="Beam search with max(n, best_of) beams, at least 2.")
    return_token_ids: bool | None = Field(None, description="Add the token ids of the answers and of the prompt.")
    return_tokens_as_token_ids: bool | None = Field(
        None,
        description="Write tokens in log-probabilities as ids (token_id:42), because different tokens may have the "
        "same text.",
    )
    timings: bool | None = Field(None, description="Add llama.cpp's times at the end of the answer.")
    timings_per_token: bool | None = Field(None, description="Add them to every event of a stream.")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=2**31 - 1,
        description="Cut a longer prompt to its last N tokens. -1: keep as many as leave room for the answer.",
    )

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments for `SamplingParams`: the sampling fields that were sent."""
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
        """Names of unknown fields that the client may have expected to change the answer."""
        options = self.stream_options.ignored_fields() if self.stream_options is not None else []
        return super().ignored_fields() + [f"stream_options.{name}" for name in options]


class CompletionRequest(GenerationBody):
    """Body of POST /v1/completions. All fields but prompt may be null, which means the default."""

    prompt: Prompts = Field(
        description="One or several prompts, as text or token ids. For encoder-decoder models, the encoder's input."
    )
    echo: bool | None = Field(
        None, description="Begin each answer with its prompt. Use it with max_tokens 0 and logprobs to score a text."
    )
    suffix: str | None = Field(None, description="For fill-in-the-middle models: the text after the answer.")
    add_special_tokens: bool | None = Field(None, description="Add the tokenizer's special tokens to each text (true).")
    decoder_prompt: DecoderPrompt | None = Field(
        None, description="For encoder-decoder models: the beginning of the answer."
    )
    forced_bos_token: Name | int | None = Field(
        None,
        description="For encoder-decoder models: first token of the answer, as written in the vocabulary or as an id.",
    )
    src_lang: Name | None = Field(
        None, description="For models with language tokens: language of the prompt, such as en_XX."
    )
    tgt_lang: Name | None = Field(
        None, description="For models with language tokens: language of the answer, such as de_DE."
    )


class PromptTokensDetails(BaseModel):
    """Part of `Usage`."""

    cached_tokens: int = 0


class Timings(BaseModel):
    """llama.cpp's times: numbers of cached tokens, prompt tokens read (`prompt`) and tokens generated (`predicted`),
    with milliseconds."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class CompletionTokensDetails(BaseModel):
    """Part of `Usage`: reasoning tokens, including the markers, for models with a reasoning parser. For requests with a
    `prediction`: draft tokens that became part of the answer, and those that did not. Rejected tokens are not among the
    completion tokens."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    """Tokens of the whole request, including answers that best_of discards."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails | None = None


class CompletionLogprobs(BaseModel):
    """One entry per token. `text_offset` counts characters from the start of the text. It is approximate if a token
    contains only part of a character."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """An answer, or the next piece of it in a stream. `stop_reason` is the stop string or stop token id that ended the
    answer, null for EOS. `score` ranks the answers of a beam search."""

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
    """A beam that continues or ends with a token. `parent` is the index of its parent among the live beams of the
    previous step. `score` is its log-probability so far, or the final score if it ends."""

    parent: int
    token: str
    score: float


class BeamStep(BaseModel):
    """A step of beam search: the live beams, best first, and the beams that ended."""

    live: list[BeamMove]
    ended: list[BeamMove]


class LiveBeams(BaseModel):
    """Steps of a prompt's beam search, in a stream with `stream_beams`."""

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
    timings: Timings | None = None


class TokenizeRequest(TemplateFields, JsonBody):
    """Body of POST /tokenize: a prompt, or messages with the variables of the chat template."""

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    prompt: str | None = Field(None, description="Text, as for /v1/completions.")
    messages: Annotated[list[Any], at_most(MAX_MESSAGES, "messages")] | None = Field(
        None, description="Messages, as for /v1/chat/completions."
    )
    content: str | None = Field(None, description="llama.cpp's name of prompt.")
    add_special_tokens: bool | None = Field(None, description="With prompt: add special tokens, such as BOS (true).")
    return_token_strs: bool | None = Field(None, description="Also return each token as written in the vocabulary.")
    src_lang: Name | None = Field(None, description="With prompt: its language, as for /v1/completions.")


class TokenizeResponse(BaseModel):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(JsonBody):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    tokens: list[int] = Field(min_length=1, fail_fast=True, description="Token ids, each within the vocabulary.")


class DetokenizeResponse(BaseModel):
    """Answer of POST /detokenize. The text appears under the names of both vLLM and llama.cpp."""

    prompt: str
    content: str


class TokenizerInfo(BaseModel):
    """Answer of GET /tokenizer_info."""

    tokenizer_class: str
    vocab_size: int
    special_tokens: dict[str, str | list[str]] = Field(description="Special tokens by name, such as bos_token.")
    chat_template: str | None = Field(description="Chat template for conversations without tools, if any.")


class VersionResponse(BaseModel):
    """Answer of GET /version."""

    version: str


class LoadResponse(BaseModel):
    """Answer of GET /load."""

    server_load: int


class ServerInfo(BaseModel):
    """Answer of GET /server_info. block_size and num_blocks are 0 for a model without a KV cache."""

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
    """A served model. For an encoder-decoder model, max_model_len limits the answer including decoder_prompt."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str = Field(description="The model's id; for an adapter, its path.")
    parent: str | None = Field(None, description="The base model, for an adapter.")
    max_model_len: int
    max_encoder_len: int | None = Field(None, description="Maximum tokens of a prompt, for an encoder-decoder model.")
    tasks: list[str] = Field(description="What the model can do.")
    endpoints: list[str] = Field(description="Endpoints that the model supports. Other endpoints return 400.")
    inputs: list[str] = Field(description="Kinds of input: text, image, audio.")
    decoding: dict[str, bool | int | float | str] | None = Field(
        None, description="Default decoding parameters, for models that generate text."
    )
    given_up_for_temperature: list[str] | None = Field(
        None, description="Parameters in `decoding` that do not apply to requests with a `temperature`."
    )
    embedding_size: int | None = Field(None, description="Dimensions of the vectors, for embedding models.")
    labels: list[str] | None = Field(None, description="Class names, for classification models.")
    catalogues: dict[str, int] | None = Field(
        None, description="Catalogues for `constraint`, with their numbers of titles."
    )


class ModelList(BaseModel):
    """Answer of GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]
