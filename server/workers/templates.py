"""Chat templates, rendered as `transformers` does it: the job of a worker."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from server.workers.fitting import HERMES, Messages, Roles, Writing, fitted, probe, shows_all, with_tool_prompt

_MOST_SAID = 1000  # characters of what a template says about its failure
# A template that tells a missing content from an empty one may take the latter for an answer without calls.
_KNOWS_NO_CONTENT = re.compile(r"""(?<!_)content['"]?\]?\s+is\s+(not\s+)?none""")
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
# What templates show, as far as it was asked: (template, roles, with tools). A service has one or two templates.
_probed: dict[tuple[str, Roles, bool], bool] = {}


class Conversation(msgspec.Struct, array_like=True):
    """What is rendered.

    Attributes:
        template: a Jinja template.
        messages: {"role": ..., "content": ...} each; arguments of tool calls are JSON as text.
        special: names that the template may use: the tokenizer's special tokens.
        variables: further ones, a client's.
        add_generation_prompt: end with what opens the assistant's answer.
        longest: characters of the text; of a longer one only the length is told.
        tools: as OpenAI's, or None.
        documents: or None.
        continue_final_message: end with the last message's text, without what closes it.
        writing: how the model writes calls, where that is known.
        prompted: the template knows no tools: a system message is to tell of them.
    """

    template: str
    messages: Messages
    special: dict[str, Any]
    variables: dict[str, Any]
    add_generation_prompt: bool
    longest: int
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    continue_final_message: bool = False
    writing: Writing | None = None
    prompted: bool = False


class Rendered(msgspec.Struct, array_like=True):
    """The text, or None where it is too long; and how many characters it has."""

    text: str | None
    length: int


def load_renderer() -> Any:
    """What renders; loaded before a worker is forked, and not where conversations are only sent."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def render(conversation: Conversation) -> Rendered:
    """Messages to the text of a prompt, in the sandbox of `transformers`.

    Raises:
        ValueError: the template refuses these messages, or fails on them; its words.
    """
    writing = conversation.writing or HERMES
    if conversation.prompted and conversation.tools:
        conversation.messages = with_tool_prompt(conversation.messages, conversation.tools, writing)
        conversation.tools = None
    conversation.messages = fitted(conversation.messages, lambda roles: _shows(conversation, roles), writing)
    text = _rendered(conversation)
    return Rendered(text if len(text) <= conversation.longest else None, len(text))


def _shows(conversation: Conversation, roles: Roles) -> bool:
    """Whether the template shows all messages of these roles; see `fitting`."""
    key = conversation.template, roles, conversation.tools is not None
    if key not in _probed:
        tools = [_PROBE_TOOL] if conversation.tools is not None else None
        asked = Conversation(conversation.template, probe(roles), conversation.special, {}, True, 0, tools)
        try:
            shown = shows_all(_rendered(asked), roles)
        except ValueError:
            shown = False
        if len(_probed) >= _MOST_PROBES:
            _probed.clear()
        _probed[key] = shown
    return _probed[key]


def _rendered(conversation: Conversation) -> str:
    refusal: Exception | None = None
    for messages in _forms(conversation):
        try:
            return _render(conversation, messages)
        except MemoryError:
            raise
        except Exception as problem:  # a template may fail in any way on messages that it was not made for
            refusal = refusal or problem
    raise ValueError((str(refusal) or type(refusal).__name__)[:_MOST_SAID]) from refusal


def _forms(conversation: Conversation) -> Iterator[Messages]:
    """The messages in the forms that templates want calls in, the best first.

    The documentation of `transformers` has it that arguments are objects; some templates were made for text, and fail
    on objects. Where an answer held calls and no text, its content is missing or empty.
    """
    messages = conversation.messages
    if not any("tool_calls" in message for message in messages):
        yield messages
        return
    contents = (None, "") if _KNOWS_NO_CONTENT.search(conversation.template) else ("",)
    for content, objects in itertools.product(contents, (True, False)):
        yield [_with_calls(message, content, objects) if "tool_calls" in message else message for message in messages]


def _render(conversation: Conversation, messages: Messages) -> str:
    texts, _ = load_renderer()(
        conversations=[messages],
        tools=conversation.tools,
        documents=conversation.documents,
        chat_template=conversation.template,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        **{**conversation.special, **conversation.variables},
    )
    return str(texts[0])


def _with_calls(message: dict[str, Any], empty: str | None, objects: bool) -> dict[str, Any]:
    calls = message["tool_calls"]
    if objects:
        calls = [{**call, "function": _with_object(call["function"])} for call in calls]
    return {**message, "content": message["content"] or empty, "tool_calls": calls}


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    text = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):  # a model may have written anything
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function
