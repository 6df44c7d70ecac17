"""Renders conversations with their chat templates; the job of a worker."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.text.conversations import Messages, render_conversation
from engine.text.fitting import Roles, fitted, probe, shows_all, with_tool_prompt
from engine.text.writing import HERMES, Writing

_MOST_SAID = 1000  # maximum characters of a template's error message
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds text.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "What to find."}},
            "required": ["text"],
        },
    },
}
_MOST_PROBES = 256
# Whether templates show all messages, as far as this was tested: (template, roles, with tools). A service has one or
# two templates.
_probed: dict[tuple[str, Roles, bool], bool] = {}


class TemplateInput(msgspec.Struct, array_like=True):
    """The input."""

    template: str
    messages: Messages  # {"role": ..., "content": ...} each; arguments of tool calls are JSON as text
    special: dict[str, Any]  # special tokens of the tokenizer, by the names that the template uses
    variables: dict[str, Any]  # further variables from the client
    add_generation_prompt: bool  # end with the beginning of the assistant's answer
    longest: int  # maximum characters of the text; for a longer one only the length is returned
    tools: list[dict[str, Any]] | None = None  # tools in OpenAI's form, or None
    documents: list[dict[str, Any]] | None = None  # documents, or None
    continue_final_message: bool = False  # end with the last message's text, without its closing tokens
    writing: Writing | None = None  # the model's call format, if known
    prompted: bool = False  # the template does not support tools, so a system message describes them
    # image_mark, image_text: as `engine.text.pictures.with_parts` takes them
    image_mark: str | None = None
    image_text: str | None = None


class RenderedTemplate(msgspec.Struct, array_like=True):
    """The text, or None if it is too long, and its number of characters."""

    text: str | None
    length: int


def render(conversation: TemplateInput) -> RenderedTemplate:
    """Render messages to the text of a prompt. Raises ValueError with the template's message if it refuses the messages
    or fails."""
    writing = conversation.writing or HERMES
    if conversation.prompted and conversation.tools:
        conversation.messages = with_tool_prompt(conversation.messages, conversation.tools, writing)
        conversation.tools = None
    conversation.messages = fitted(conversation.messages, lambda roles: _shows(conversation, roles), writing)
    text = _rendered(conversation)
    return RenderedTemplate(text if len(text) <= conversation.longest else None, len(text))


def _shows(conversation: TemplateInput, roles: Roles) -> bool:
    """Whether the template shows all messages with these roles; see `fitting`."""
    key = conversation.template, roles, conversation.tools is not None
    if key not in _probed:
        tools = [_PROBE_TOOL] if conversation.tools is not None else None
        asked = TemplateInput(conversation.template, probe(roles), conversation.special, {}, True, 0, tools)
        try:
            shown = shows_all(_rendered(asked), roles)
        except ValueError:
            shown = False
        if len(_probed) >= _MOST_PROBES:
            _probed.clear()
        _probed[key] = shown
    return _probed[key]


def _rendered(conversation: TemplateInput) -> str:
    try:
        return render_conversation(
            conversation.template,
            conversation.messages,
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            image_mark=conversation.image_mark,
            image_text=conversation.image_text,
            **{**conversation.special, **conversation.variables},
        )
    except ValueError as problem:
        raise ValueError(str(problem)[:_MOST_SAID]) from problem
