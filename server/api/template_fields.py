"""The inputs of the chat template besides the messages: tools, documents, variables."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, Field, WithJsonSchema

from server.api.fields import Name, at_most

MAX_TOOLS = 128  # maximum functions in one request, as at OpenAI
MAX_DOCUMENTS = 1024
MAX_VARIABLES = 64  # of chat_template_kwargs
MAX_FUNCTION_NAME = 64  # characters
FUNCTION_NAME = r"[a-zA-Z0-9_.-]{1,64}"

_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{FUNCTION_NAME}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"], "description": "A JSON schema of the arguments."},
        "strict": {"type": ["boolean", "null"], "description": "Whether the arguments must match the schema."},
    },
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}
# Checked by `server.answering.tools`, whose errors name the wrong tool.
Tools = Annotated[
    list[Any], at_most(MAX_TOOLS, "tools"), WithJsonSchema({"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL})
]
ToolChoice = Annotated[Any, WithJsonSchema(_CHOICE)]
_DOCUMENTS = {
    "type": "array",
    "maxItems": MAX_DOCUMENTS,
    "items": {"type": "object", "properties": {"title": {"type": "string"}, "text": {"type": "string"}}},
}


# The names of llama.cpp, vLLM and Qwen's service.
ReasoningBudget = Annotated[
    int | None,
    Field(
        ge=-1,
        validation_alias=AliasChoices(
            "reasoning_budget", "thinking_token_budget", "thinking_budget", "thinking_budget_tokens"
        ),
        description="Maximum tokens of reasoning; then the model must answer. 0: none; -1: no limit.",
    ),
]


TemplateVariables = Annotated[dict[str, Any], at_most(MAX_VARIABLES, "variables")]


class TemplateFields(BaseModel):
    """The fields of all bodies with messages."""

    tools: Tools | None = Field(None, description="Functions that the answer may call.")
    documents: Annotated[list[Any], at_most(MAX_DOCUMENTS, "documents"), WithJsonSchema(_DOCUMENTS)] | None = Field(
        None, description="Documents for chat templates that use them."
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="Variables for the chat template, such as enable_thinking."
    )
    reasoning_effort: Name | None = Field(None, description="Passed to the chat template as a variable of this name.")
    add_generation_prompt: bool | None = Field(
        None,
        description="End the prompt with the beginning of an assistant message (true, unless continue_final_message "
        "is set).",
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message instead of starting a new one."
    )
