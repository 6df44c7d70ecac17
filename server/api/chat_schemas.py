"""The HTTP bodies of /v1/chat/completions, in OpenAI's shapes with vLLM's extra fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, WithJsonSchema
from typing_extensions import TypedDict

from engine import MAX_LOGPROBS, SamplingParams
from server.api.fields import at_most
from server.api.schemas import MAX_MESSAGES, GenerationBody, LiveBeams, Timings, Usage
from server.api.template_fields import FUNCTION_NAME, ReasoningBudget, TemplateFields, ToolChoice

MAX_CALLS = 128  # maximum functions in one message
_TEXT_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART_SCHEMA}]}
_CALL_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{FUNCTION_NAME}$"},
                "arguments": {"type": "string", "description": "A JSON object as text."},
            },
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}


def _message_schema(roles: list[str], properties: dict[str, Any], *required: str) -> dict[str, Any]:
    shared = {"role": {"enum": roles}, "content": _CONTENT_SCHEMA, "name": {"type": ["string", "null"]}}
    return {"type": "object", "properties": shared | properties, "required": ["role", *required]}


_TEXT = {"type": ["string", "null"]}
_CALLS_SCHEMA = {"type": "array", "minItems": 1, "maxItems": MAX_CALLS, "items": _CALL_SCHEMA}
_MESSAGES_SCHEMA = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "items": {
        "anyOf": [
            _message_schema(["system", "developer", "user"], {}, "content"),
            _message_schema(["assistant"], {"reasoning_content": _TEXT, "reasoning": _TEXT}, "content"),
            _message_schema(["assistant"], {"tool_calls": _CALLS_SCHEMA}, "tool_calls"),
            _message_schema(["tool"], {"tool_call_id": {"type": "string"}}, "content", "tool_call_id"),
        ]
    },
}
# Checked by `server.answering.messages.read_messages`, whose errors name the wrong message.
Messages = Annotated[list[Any], at_most(MAX_MESSAGES, "messages"), WithJsonSchema(_MESSAGES_SCHEMA)]
# Checked by `server.answering.prediction.read_prediction`.
Prediction = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"type": {"const": "content"}, "content": _CONTENT_SCHEMA},
            "required": ["type", "content"],
        }
    ),
]


class ChatCompletionRequest(TemplateFields, GenerationBody):
    """Body of POST /v1/chat/completions. All fields but messages may be null, which means the default."""

    messages: Messages = Field(
        description="The conversation so far. The content of a message is a text or a list of text parts."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Takes precedence over max_tokens, its older name."
    )
    logprobs: bool | None = Field(None, description="Report the log-probability of each token.")
    top_logprobs: int | None = Field(
        None,
        ge=-1,
        le=MAX_LOGPROBS,
        description=f"With logprobs: also report this many of the most probable tokens. -1 means the maximum "
        f"({MAX_LOGPROBS}).",
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="Whether the answer calls functions: auto (the model decides), none, required, or a certain "
        "function.",
    )
    parallel_tool_calls: bool | None = Field(None, description="Allow several function calls in one answer (true).")
    reasoning_budget: ReasoningBudget = None
    prediction: Prediction | None = Field(
        None,
        description="A text that much of the answer is expected to repeat, such as a file that is edited. It makes the "
        "answer faster and changes nothing else.",
    )
    echo: bool | None = Field(
        None, description="Begin the answer with the text of the last message, if it has the same role."
    )

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments for `SamplingParams`: the sampling fields that were sent. Raises InvalidRequestError:
        max_tokens is invalid, even if it is not used."""
        fields = super().sampling()
        if self.max_completion_tokens is not None:
            SamplingParams(max_tokens=fields.get("max_tokens"))  # not used, but invalid all the same
            fields["max_tokens"] = self.max_completion_tokens
        if fields.pop("logprobs", False) is not False:
            fields["logprobs"] = MAX_LOGPROBS if self.top_logprobs == -1 else self.top_logprobs or 0
        return fields


# An answer may have a hundred thousand of these: dictionaries take a third of the memory of models.
class TopLogprob(TypedDict):
    """A token, its UTF-8 bytes (null if unknown) and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """A token of the answer with the most probable alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatFunction(BaseModel):
    """A function that is called, with its arguments: JSON as text."""

    name: str
    arguments: str


class ChatCall(BaseModel):
    """A function call. A message with role tool returns its result with the same `id`."""

    id: str
    type: str = "function"
    function: ChatFunction


class ChatMessage(BaseModel):
    """The assistant's message, or the functions that it calls; content is null if there is only a call. The
    reasoning before the message has two names with the same value."""

    role: str
    content: str | None
    refusal: None = None
    annotations: list[Any] = []
    tool_calls: list[ChatCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(BaseModel):
    """An answer. `stop_reason` is the stop string or stop token id that ended it, null for EOS. `score` ranks the
    answers of a beam search."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    score: float | None = None


class PromptFields(BaseModel):
    """Facts about the prompt, if the request asks for them."""

    prompt_logprobs: list[dict[int, dict[str, float | int | str | None]] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, dict[str, float | int | str | None]] | None] | None = None
    prompt_token_ids: list[int] | None = None
    timings: Timings | None = None


class FunctionDelta(BaseModel):
    """New data of a called function: first its name, then more of the arguments."""

    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """New data of the call with this index; its id, type and function's name come first."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    """New data of a message: first its role, then text, reasoning or calls."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatPiece(BaseModel):
    """One answer's next piece in a stream. The first piece may have `prompt`, which is shown beside it."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    score: float | None = None
    prompt: PromptFields = Field(default_factory=PromptFields, exclude=True)


class ChatCompletionChunk(BaseModel):
    """One event of a stream of POST /v1/chat/completions; the first one has facts about the prompt."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatPiece]
    system_fingerprint: str | None = None
    usage: Usage | None = None
    prompt_logprobs: list[dict[int, dict[str, float | int | str | None]] | None] | None = None
    prompt_token_ids: list[int] | None = None
    beams: LiveBeams | None = None
    timings: Timings | None = None
