"""The HTTP bodies of /v1/messages, in Anthropic's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema, create_model
from typing_extensions import TypedDict

from engine import MAX_STOP_STRINGS
from server.api.base import Body
from server.api.fields import at_most
from server.api.response_schemas import ONE_ANSWER_FIELDS
from server.api.schemas import MAX_MESSAGES, ServedBody
from server.api.template_fields import FUNCTION_NAME, MAX_TOOLS, MAX_VARIABLES

_MAX_MEMBERS = 32  # of the objects tool_choice, thinking, metadata and output_config
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
        "strict": {"type": ["boolean", "null"], "description": "The input must match the schema."},
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
    """What a prompt is made of. The values are checked by `server.answering.message_input`, whose errors say which
    block is at fault."""

    model: str | None = Field(None, description="The served model's id; may be left out.")
    messages: Annotated[list[Any], at_most(MAX_MESSAGES, "messages"), WithJsonSchema(_MESSAGES)] = Field(
        description="The conversation so far; content is text, or a list of blocks. One of the assistant at the end is "
        "gone on from."
    )
    system: Annotated[Any, at_most(MAX_MESSAGES, "blocks"), WithJsonSchema(_TEXTS)] | None = Field(
        None, description="A system message before all others: text, or text blocks."
    )
    tools: Annotated[list[Any], at_most(MAX_TOOLS, "tools"), WithJsonSchema(_TOOLS)] | None = Field(
        None, description="Functions that the answer may call."
    )
    tool_choice: Annotated[dict[str, Any], _SMALL, WithJsonSchema(_CHOICE)] | None = Field(
        None, description="Whether the answer calls functions: auto (the model decides), any, none, or which one."
    )
    thinking: Annotated[dict[str, Any], _SMALL, WithJsonSchema(_THINKING)] | None = Field(
        None, description="Whether the model is to think: enable_thinking for its template."
    )
    output_config: Annotated[dict[str, Any], _SMALL] | None = Field(
        None, description="`effort`: for the model's template; `format`: what the answer's text must be."
    )
    chat_template_kwargs: Annotated[dict[str, Any], at_most(MAX_VARIABLES, "variables")] | None = Field(
        None, description="Variables for the model's template, such as enable_thinking."
    )


class MessageRequest(_Conversation, _AnswerBody):
    """Body of POST /v1/messages. Null means the default, for every field but the messages and max_tokens."""

    max_tokens: int = Field(
        ge=1, description="Most tokens of the answer, its thinking included; no more than there is room for."
    )
    stop_sequences: Annotated[list[str], Field(fail_fast=True), at_most(MAX_STOP_STRINGS, "strings")] | None = Field(
        None, description="Strings at which the answer ends."
    )
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    metadata: Annotated[dict[str, Any], _SMALL] | None = Field(None, description="Changes nothing.")


class CountTokensRequest(_Conversation, Body):
    """Body of POST /v1/messages/count_tokens."""


class TextBlock(TypedDict):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """What the model thought; nothing signs it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """A call of a function; a block of the type tool_result names its result by `id`."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(TypedDict):
    """Tokens of the whole request; those that were found in the cache are not among the input's."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
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
    capabilities: None = None
    line: None = None


class MessageModelList(BaseModel):
    """Answer of GET /v1/models to a client of Anthropic's."""

    data: list[MessageModel]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class MessageErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessageError(BaseModel):
    """Anthropic's error body."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail
