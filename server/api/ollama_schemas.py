"""The HTTP bodies of Ollama's endpoints, in its shapes (its version 0.13)."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from engine import MAX_LOGPROBS
from server.api.fields import at_most
from server.api.pooling_schemas import MAX_INPUTS, NumbersBody
from server.api.schemas import MAX_MESSAGES, ServedBody
from server.api.template_fields import FUNCTION_NAME, Tools

_MAX_OPTIONS = 64
_MAX_IMAGES = 64
_MAX_CONTEXT = 2**20  # ids; the model's context is far shorter
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_FOREVER = float("inf")


def seconds_of(value: Any) -> float:
    """A duration as Ollama's clients send it: seconds, or a text such as "5m" or "1h30m". Below 0 means forever. Raises
    ValueError if it is neither."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _FOREVER if value < 0 else float(value)
    if not isinstance(value, str) or not value:
        raise ValueError
    sign, text = value[:1], value.lstrip("+-")
    if text == "0" or (text.isascii() and text.isdigit()):
        seconds = float(text)
    else:
        parts = _PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValueError
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return _FOREVER if sign == "-" and seconds else seconds


def _check_duration(value: Any) -> float:
    try:
        return seconds_of(value)
    except ValueError:
        message = 'must be a number of seconds or a duration such as "5m" or "1h30m"'
        raise PydanticCustomError("duration", message) from None


_DURATION = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^[+-]?([0-9.]+(ns|us|ms|s|m|h))+$"}]}
KeepAlive = Annotated[
    Annotated[float, PlainValidator(_check_duration), WithJsonSchema(_DURATION)] | None,
    Field(
        description="Time that the model stays loaded after the request. It has no effect if the server has one model, "
        "or the model is pinned."
    ),
]
Options = Annotated[
    Annotated[dict[str, Any], at_most(_MAX_OPTIONS, "fields")] | None,
    Field(
        description="Sampling options: num_predict, temperature, top_k, top_p, min_p, typical_p, seed, stop, "
        "repeat_penalty, presence_penalty, frequency_penalty, num_ctx."
    ),
]


def _check_format(value: Any) -> Any:
    if value in ("", "json") or isinstance(value, dict):
        return value
    raise PydanticCustomError("format", 'must be "json" or a JSON schema, which is an object')


Format = Annotated[
    Annotated[
        Any, PlainValidator(_check_format), WithJsonSchema({"anyOf": [{"enum": ["json", ""]}, {"type": "object"}]})
    ]
    | None,
    Field(description="Format of the answer: json for any object, or a JSON schema."),
]
Think = Annotated[
    bool | Literal["low", "medium", "high", "max"] | None,
    Field(
        description="Whether the model reasons before it answers. Sets enable_thinking for the chat template; a level "
        "also sets reasoning_effort."
    ),
]
Images = Annotated[
    Annotated[list[Any], at_most(_MAX_IMAGES, "images")] | None,
    Field(description="Files in base64, for models that read images."),
]
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{FUNCTION_NAME}$"},
                "arguments": {"type": "object"},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "assistant", "tool"]},
        "content": {"type": "string"},
        "thinking": {"type": "string"},
        "tool_calls": {"type": "array", "items": _CALL},
        "tool_name": {"type": "string"},
        "tool_call_id": {"type": "string"},
    },
    "required": ["role", "content"],
}
_MESSAGES = {"type": "array", "maxItems": MAX_MESSAGES, "items": _MESSAGE}


class OllamaAnswerBody(ServedBody):
    """The common fields of requests for text."""

    model: str | None = Field(
        None, description="Name of the served model or of an adapter, with or without the tag latest. Optional."
    )
    stream: bool | None = Field(None, description="Stream the answer as lines of JSON (true).")
    format: Format = None
    options: Options = None
    think: Think = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = Field(None, description="Report the log-probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Also report this many of the most probable tokens."
    )
    truncate: bool | None = Field(None, description="Has no effect: a prompt that is too long is refused.")
    shift: bool | None = Field(None, description="Has no effect: an answer ends when the context is full.")


class OllamaChatRequest(OllamaAnswerBody):
    """Body of POST /api/chat. Null means the default."""

    messages: Annotated[list[Any], at_most(MAX_MESSAGES, "messages"), WithJsonSchema(_MESSAGES)] | None = Field(
        None, description="The conversation so far. Without messages, the answer says that the model is loaded."
    )
    tools: Tools | None = Field(None, description="Functions that the answer may call.")


class OllamaGenerateRequest(OllamaAnswerBody):
    """Body of POST /api/generate. Null means the default."""

    prompt: str | None = Field(
        None, description="The user's text. Without one, the answer says that the model is loaded."
    )
    suffix: str | None = Field(None, description="For fill-in-the-middle models: the text after the answer.")
    system: str | None = Field(None, description="A system message before the prompt.")
    template: str | None = Field(None, description="Refused: the model's own chat template makes the prompt.")
    raw: bool | None = Field(None, description="Send the prompt to the model without the chat template.")
    context: (
        Annotated[
            list[int],
            Field(fail_fast=True),
            at_most(_MAX_CONTEXT, "token ids"),
            WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}}),
        ]
        | None
    ) = Field(None, description="The context of an earlier answer, which this request continues.")
    images: Images = None


def _check_texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("texts", "must be a string or a list of strings")
    if len(texts) > MAX_INPUTS:
        raise PydanticCustomError("limit", f"may have at most {MAX_INPUTS} texts, got {len(texts)}")
    return [] if value == "" else texts


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": MAX_INPUTS, "items": {"type": "string"}}]}


class OllamaEmbedRequest(NumbersBody):
    """Body of POST /api/embed. Null means the default."""

    input: Annotated[Any, PlainValidator(_check_texts), WithJsonSchema(_TEXTS)] | None = Field(
        None, description="One or several texts. Without one, no vectors are returned."
    )
    truncate: bool | None = Field(None, description="Cut texts to the model's limit (true).")
    dimensions: int | None = Field(None, ge=0, description="Keep only this many features, the first ones. 0 keeps all.")
    options: Options = None
    keep_alive: KeepAlive = None


class OllamaEmbeddingsRequest(NumbersBody):
    """Body of POST /api/embeddings, which /api/embed has replaced. Null means the default."""

    prompt: str | None = Field(None, description="A text. Without one, the vector is empty.")
    options: Options = None
    keep_alive: KeepAlive = None


class OllamaNameRequest(ServedBody):
    """The body of requests about a model."""

    model: str | None = Field(None, description="Name of the model.")
    name: str | None = Field(None, description="Older name of model.")
    stream: bool | None = Field(None, description="Answer with lines of JSON (true).")
    verbose: bool | None = Field(None, description="Has no effect.")


class OllamaError(BaseModel):
    """Ollama's error body."""

    error: str


class OllamaFunction(TypedDict):
    """A called function, with its arguments as an object."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(TypedDict):
    """A function call. A message with role tool returns its result, with `tool_name` or the same id as
    `tool_call_id`."""

    id: str
    function: OllamaFunction


class OllamaMessage(TypedDict):
    """The assistant's message, or a part of it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class _Answer(BaseModel):
    """The common fields of answers and lines of streams. The last line has the numbers: tokens, and durations in
    nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    logprobs: list[dict[str, Any]] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatAnswer(_Answer):
    """Answer of POST /api/chat, and a line of its stream."""

    message: OllamaMessage


class OllamaGenerateAnswer(_Answer):
    """Answer of POST /api/generate, and a line of its stream."""

    response: str
    thinking: str | None = None
    context: list[int] | None = None


class OllamaEmbedAnswer(BaseModel):
    """Answer of POST /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(BaseModel):
    """Answer of POST /api/embeddings."""

    embedding: list[float]


class OllamaDetails(BaseModel):
    """Facts about the files of a model. What they do not say is empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListed(BaseModel):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int = Field(description="Bytes of the files.")
    digest: str = Field(
        description="Identifies the model's files by their names, sizes and times; not a hash of their bytes."
    )
    details: OllamaDetails
    capabilities: list[str]


class OllamaModels(BaseModel):
    """Answer of GET /api/tags."""

    models: list[OllamaListed]


class OllamaRunning(BaseModel):
    """A loaded model."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(BaseModel):
    """Answer of GET /api/ps."""

    models: list[OllamaRunning]


class OllamaShown(BaseModel):
    """Answer of POST /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(BaseModel):
    """Answer of GET /api/version: the version of Ollama whose API this is, and the server's own."""

    version: str
    octavo: str


class OllamaStatus(BaseModel):
    """Answer of POST /api/pull, and a line of its stream."""

    status: str
