"""The HTTP bodies of /v1/responses, in OpenAI's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, create_model
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from server.api.base import JsonBody
from server.api.chat_schemas import ChatTokenLogprob
from server.api.fields import Name, at_most, sampling_fields
from server.api.schemas import MAX_MESSAGES, ServedBody
from server.api.template_fields import FUNCTION_NAME, MAX_TOOLS, MAX_VARIABLES, ReasoningBudget

MAX_ADDED = 20  # maximum items of a conversation in one request, as at OpenAI
MAX_METADATA = 16  # maximum pairs, as at OpenAI
MAX_METADATA_NAME = 64  # characters
MAX_METADATA_VALUE = 512
_MAX_MEMBERS = 32  # maximum fields of the objects text and reasoning
# The engine's sampling parameters that apply to a single answer; OpenAI's own names are in the bodies themselves.
_NOT_HERE = frozenset(
    {
        "n", "max_tokens", "logprobs", "prompt_logprobs", "stream_beams", "encoder_repetition_penalty",
        "encoder_no_repeat_ngram_size", "decoder_start_token_id", "forced_bos_token_id",
    }
)  # fmt: skip
ONE_ANSWER_FIELDS = {name: field for name, field in sampling_fields().items() if name not in _NOT_HERE}

if TYPE_CHECKING:
    OneAnswerBody = ServedBody
else:
    OneAnswerBody = create_model("OneAnswerFields", __base__=ServedBody, **ONE_ANSWER_FIELDS)

_INPUT_TEXT = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _INPUT_TEXT}]}
_CALL_ID = {"type": "string", "minLength": 1, "maxLength": 256}


def _item(kind: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    shared = {"type": {"const": kind}, "id": {"type": ["string", "null"]}}
    return {"type": "object", "properties": shared | properties, "required": list(required)}


_INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
            "items": {
                "anyOf": [
                    _item(
                        "message",
                        {"role": {"enum": ["system", "developer", "user", "assistant"]}, "content": _CONTENT},
                        *("role", "content"),
                    ),
                    _item(
                        "function_call",
                        {
                            "call_id": _CALL_ID,
                            "name": {"type": "string", "pattern": f"^{FUNCTION_NAME}$"},
                            "arguments": {"type": "string"},
                        },
                        *("type", "call_id", "name", "arguments"),
                    ),
                    _item(
                        "function_call_output",
                        {"call_id": _CALL_ID, "output": _CONTENT},
                        *("type", "call_id", "output"),
                    ),
                    _item("reasoning", {"content": {"type": ["array", "null"]}}, "type"),
                ]
            },
        },
    ]
}
_ITEMS = {**_INPUT_SCHEMA["anyOf"][1], "maxItems": MAX_ADDED}
_FUNCTION = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string", "pattern": f"^{FUNCTION_NAME}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"], "description": "A JSON schema of the arguments."},
        "strict": {"type": ["boolean", "null"], "description": "Whether the arguments must match the schema."},
    },
    "required": ["type", "name"],
}
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
    ]
}
_FORMAT = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": {"type": "string", "description": "With json_schema."},
        "schema": {"type": "object", "description": "With json_schema."},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["type"],
}
_TEXT = {"type": "object", "properties": {"format": _FORMAT}}
_REASONING = {
    "type": "object",
    "properties": {"effort": {"type": ["string", "null"]}, "summary": {"enum": ["auto", "concise", "detailed", None]}},
}


def _check_metadata(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("metadata", "must be an object whose values are strings")
    if len(value) > MAX_METADATA:
        raise PydanticCustomError("limit", f"may have at most {MAX_METADATA} pairs, got {len(value)}")
    for name, text in value.items():
        if not isinstance(text, str):
            raise PydanticCustomError("metadata", "must be an object whose values are strings")
        if len(name) > MAX_METADATA_NAME or len(text) > MAX_METADATA_VALUE:
            limit = f"may hold names of at most {MAX_METADATA_NAME} and values of at most {MAX_METADATA_VALUE}"
            raise PydanticCustomError("limit", f"{limit} characters, got {len(name)} and {len(text)}")
    return value


_CONVERSATION = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
        {"type": "null"},
    ]
}
_METADATA = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": MAX_METADATA_NAME},
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
}


Metadata = Annotated[dict[str, str] | None, BeforeValidator(_check_metadata), WithJsonSchema(_METADATA)]


class ResponseStreamOptions(JsonBody):
    """Options of a stream. `include_obfuscation` has no effect."""

    include_obfuscation: bool | None = Field(None, description="Has no effect.")


class ResponseRequest(OneAnswerBody):
    """Body of POST /v1/responses. All fields but input may be null, which means the default."""

    # Checked by `server.answering.response_input`, whose errors name the wrong item.
    input: Annotated[Any, at_most(MAX_MESSAGES, "items"), WithJsonSchema(_INPUT_SCHEMA)] = Field(
        None, description="The input: a text, or items (messages, function calls and their results, reasoning)."
    )
    model: str | None = Field(None, description="Id of the served model, or name of an adapter. Optional.")
    instructions: str | None = Field(None, description="A system message before all others.")
    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, description="Maximum tokens of the answer, including reasoning.")
    previous_response_id: Name | None = Field(
        None, description="Continue a stored response: its input and output come before this input."
    )
    conversation: Annotated[Any, WithJsonSchema(_CONVERSATION)] = Field(
        None, description="Continue a stored conversation: its items come before the input, which is added to it."
    )
    store: bool | None = Field(None, description="Store the response, if the server has a response store (true).")
    metadata: Metadata = Field(None, description="Key-value pairs that are stored with the response.")
    include: Annotated[list[Name], Field(fail_fast=True), at_most(_MAX_MEMBERS, "names")] | None = Field(
        None, description="message.output_text.logprobs adds log-probabilities of the answer's tokens."
    )
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="With log-probabilities in include: also report this many of the most probable tokens.",
    )
    tools: (
        Annotated[
            list[Any],
            at_most(MAX_TOOLS, "tools"),
            WithJsonSchema({"type": "array", "maxItems": MAX_TOOLS, "items": _FUNCTION}),
        ]
        | None
    ) = Field(None, description="Functions that the answer may call.")
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] | None = Field(
        None,
        description="Whether the answer calls functions: auto (the model decides), none, required, or a certain "
        "function.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several function calls in one answer (true).")
    text: Annotated[dict[str, Any], at_most(_MAX_MEMBERS, "fields"), WithJsonSchema(_TEXT)] | None = Field(
        None, description="`format`: format of the answer's text."
    )
    reasoning: Annotated[dict[str, Any], at_most(_MAX_MEMBERS, "fields"), WithJsonSchema(_REASONING)] | None = Field(
        None, description="`effort`: passed to the chat template."
    )
    reasoning_budget: ReasoningBudget = None
    chat_template_kwargs: Annotated[dict[str, Any], at_most(MAX_VARIABLES, "variables")] | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    truncation: Name | None = Field(None, description="disabled or auto. The input is never truncated.")
    background: bool | None = Field(
        None, description="Return immediately and generate the response in the background; needs a response store."
    )
    max_tool_calls: int | None = Field(None, ge=1, description="Has no effect, because no tools run on the server.")
    user: str | None = Field(None, max_length=512, description="Repeated in the response.")
    safety_identifier: str | None = Field(None, max_length=512, description="Repeated in the response.")
    prompt_cache_key: str | None = Field(None, max_length=512, description="Repeated in the response.")
    service_tier: Name | None = Field(None, description="Has no effect.")


# An answer may contain many items: dictionaries take a third of the memory of models.
class OutputText(TypedDict):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(TypedDict):
    """The model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(TypedDict):
    """A message of the assistant."""

    type: Literal["message"]
    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(TypedDict):
    """The model's reasoning. Summaries are not supported."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(TypedDict):
    """A function call. An item of type function_call_output returns its result with the same `call_id`."""

    type: Literal["function_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class OutputCustomCall(TypedDict):
    """A call of a tool that takes text. An item of type custom_tool_call_output returns its result with the same
    `call_id`."""

    type: Literal["custom_tool_call"]
    id: str
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall


class InputTokensDetails(TypedDict):
    """Part of `ResponseUsage`. This server has no prices and counts no tokens as written to a cache."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(TypedDict):
    """Part of `ResponseUsage`."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of the whole request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseProblem(TypedDict):
    """The reason why the response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """The reason why the answer is incomplete."""

    reason: Literal["max_output_tokens"]


class ConversationId(TypedDict):
    """The conversation of an answer."""

    id: str


class ResponseObject(BaseModel):
    """A response with the parameters of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseProblem | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    store: bool = Field(description="Whether the response is stored.")
    previous_response_id: str | None
    conversation: ConversationId | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    presence_penalty: float
    frequency_penalty: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    background: bool
    service_tier: Literal["default"]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None


class InputTokens(BaseModel):
    """Answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDeleted(BaseModel):
    """Answer of DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """Answer of GET /v1/responses/{response_id}/input_items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: list[dict[str, Any]], *, more: bool) -> ItemList:
        """A page. `more`: whether further items follow."""
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return cls(data=items, first_id=first, last_id=last, has_more=more)


class ConversationFields(JsonBody):
    """Body of POST /v1/conversations."""

    items: Annotated[list[Any], at_most(MAX_ADDED, "items"), WithJsonSchema(_ITEMS)] | None = Field(
        None, description="The first items: messages, function calls and their results, reasoning."
    )
    metadata: Metadata = Field(None, description="Key-value pairs that are stored with the conversation.")


class ConversationUpdate(JsonBody):
    """Body of POST /v1/conversations/{conversation_id}."""

    metadata: Metadata = Field(description="Key-value pairs that replace the stored ones.")


class NewItems(JsonBody):
    """Body of POST /v1/conversations/{conversation_id}/items."""

    items: Annotated[list[Any], at_most(MAX_ADDED, "items"), WithJsonSchema(_ITEMS)] = Field(
        description="Items to append."
    )


class ConversationObject(BaseModel):
    """A conversation without its items."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(BaseModel):
    """Answer of DELETE /v1/conversations/{conversation_id}."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True
