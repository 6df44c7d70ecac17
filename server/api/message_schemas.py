"""The HTTP bodies of /v1/messages, in Anthropic's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema, create_model
from typing_extensions import TypedDict

from engine import MAX_STOP_STRINGS
from server.api.base import JsonBody
from server.api.fields import at_most
from server.api.response_schemas import ONE_ANSWER_FIELDS
from server.api.schemas import MAX_MESSAGES, ServedBody
from server.api.template_fields import FUNCTION_NAME, MAX_TOOLS, MAX_VARIABLES

_MAX_MEMBERS = 32  # maximum fields of the objects tool_choice, thinking, metadata and output_config
_FIELDS = {name: field for name, field in ONE_ANSWER_FIELDS.items() if name != "stop"}  # here: stop_sequences

if TYPE_CHECKING:
    _AnswerBody = ServedBody
else:
    _AnswerBody = create_model("MessageSamplingFields", __base__=ServedBody, **_FIELDS)

_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "maxItems": MAX_MESSAGES, "items": _TEXT_BLOCK}]}
_ID = {"type": "string", "minLength": 1, "maxLength": 256}
_BLOCK = {
    "anyOf": [
        _TEXT_BLOCK,
        {
            "type": "object",
            "properties": {
                "type": {"const": "tool_use"},
                "id": _ID,
                "name": {"type": "string", "pattern": f"^{FUNCTION_NAME}$"},
                "input": {"type": "object"},
            },
            "required": ["type", "id", "name", "input"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "tool_result"}, "tool_use_id": _ID, "content": _TEXTS},
            "required": ["type", "tool_use_id"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "thinking"}, "thinking": {"type": "string"}},
            "required": ["type", "thinking"],
        },
    ]
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _BLOCK}]}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "type": "object",
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _CONTENT},
        "required": ["role", "content"],
    },
}
_TOOL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{FUNCTION_NAME}$"},
        "description": {"type": ["string", "null"]},
        "input_schema": {"type": "object", "description": "A JSON schema of the input."},
        "strict": {"type": ["boolean", "null"], "description": "Whether the input must match the schema."},
    },
    "required": ["name", "input_schema"],
}
_TOOLS = {"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL}
_CHOICE = {
    "type": "object",
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": {"type": "string", "description": "With tool."},
        "disable_parallel_tool_use": {"type": ["boolean", "null"]},
    },
    "required": ["type"],
}
_THINKING = {
    "type": "object",
    "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}},
    "required": ["type"],
}
_SMALL = at_most(_MAX_MEMBERS, "fields")


class _Conversation(BaseModel):
    """The fields that make a prompt. `server.answering.message_input` checks their values, so that errors name the
    wrong block."""

    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    messages: Annotated[list[Any], at_most(MAX_MESSAGES, "messages"), WithJsonSchema(_MESSAGES)] = Field(
        description="The conversation so far. The content of a message is a text or a list of blocks. A final "
        "assistant message is continued."
    )
    system: Annotated[Any, at_most(MAX_MESSAGES, "blocks"), WithJsonSchema(_TEXTS)] | None = Field(
        None, description="A system message before all others: text, or text blocks."
    )
    tools: Annotated[list[Any], at_most(MAX_TOOLS, "tools"), WithJsonSchema(_TOOLS)] | None = Field(
        None, description="Functions that the answer may call."
    )
    tool_choice: Annotated[dict[str, Any], _SMALL, WithJsonSchema(_CHOICE)] | None = Field(
        None,
        description="Whether the answer calls functions: auto (the model decides), any, none, or a certain function.",
    )
    thinking: Annotated[dict[str, Any], _SMALL, WithJsonSchema(_THINKING)] | None = Field(
        None, description="Whether the model should reason; sets enable_thinking for the chat template."
    )
    output_config: Annotated[dict[str, Any], _SMALL] | None = Field(
        None, description="`effort`: passed to the chat template. `format`: format of the answer's text."
    )
    chat_template_kwargs: Annotated[dict[str, Any], at_most(MAX_VARIABLES, "variables")] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )


class MessageRequest(_Conversation, _AnswerBody):
    """Body of POST /v1/messages. All fields but messages and max_tokens may be null, which means the default."""

    max_tokens: int = Field(
        ge=1, description="Maximum tokens of the answer, including thinking; lowered to the space left in the context."
    )
    stop_sequences: Annotated[list[str], Field(fail_fast=True), at_most(MAX_STOP_STRINGS, "strings")] | None = Field(
        None, description="Strings that end the answer."
    )
    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    metadata: Annotated[dict[str, Any], _SMALL] | None = Field(None, description="Has no effect.")


class CountTokensRequest(_Conversation, JsonBody):
    """Body of POST /v1/messages/count_tokens."""


class TextBlock(TypedDict):
    """Text of the answer."""

    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(TypedDict):
    """The model's reasoning, without a signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class Caller(TypedDict):
    """The origin of a call: always the model itself."""

    type: Literal["direct"]


class ToolUseBlock(TypedDict):
    """A function call. A tool_result block returns its result with the same `id`."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller
    toolset_name: None


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(TypedDict):
    """Kinds of output tokens, if a single token ends the model's reasoning."""

    thinking_tokens: int


class MessageDeltaUsage(TypedDict):
    """Tokens of the whole request. Cached tokens are not part of the input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None
    server_tool_use: None


class CacheCreation(TypedDict):
    """Tokens that this request wrote to Anthropic's caches: always 0, because this server has no prices and does not
    count them."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(MessageDeltaUsage):
    """The fields of `MessageDeltaUsage`, and those of Anthropic's fields that have only one value here."""

    cache_creation: CacheCreation
    inference_geo: None
    service_tier: Literal["standard"]
    speed: None


class MessageObject(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    stop_details: None
    container: None
    diagnostics: None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageModel(BaseModel):
    """A served model, in Anthropic's shape."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str = Field(description="When the service started, in RFC 3339.")
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"
    deprecated_at: None = None
    retires_at: None = None
    capabilities: None = None
    line: None = None


class MessageModelList(BaseModel):
    """Answer of GET /v1/models to Anthropic's clients."""

    data: list[MessageModel]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class MessageErrorDetail(BaseModel):
    """The error: its type and a message."""

    type: str
    message: str


class MessageError(BaseModel):
    """Anthropic's error body."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail
