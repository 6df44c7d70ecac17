"""Conversations rendered by their chat templates: the job of a worker."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.text.conversations import Messages, render_conversation

_MOST_SAID = 1000  # characters of what a template says about its failure


class Conversation(msgspec.Struct, array_like=True):
    """What is rendered.

    Attributes:
        template: a Jinja template.
        messages: {"role": ..., "content": ...} each; arguments of tool calls are JSON as text.
        variables: further names that the template may use: the tokenizer's special tokens, and a client's.
        add_generation_prompt: end with what opens the assistant's answer.
        longest: characters of the text; of a longer one only the length is told.
        tools: as OpenAI's, or None.
        documents: or None.
        continue_final_message: end with the last message's text, without what closes it.
    """

    template: str
    messages: Messages
    variables: dict[str, Any]
    add_generation_prompt: bool
    longest: int
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    continue_final_message: bool = False


class Rendered(msgspec.Struct, array_like=True):
    """The text, or None where it is too long; and how many characters it has."""

    text: str | None
    length: int


def render(conversation: Conversation) -> Rendered:
    """Messages to the text of a prompt.

    Raises:
        ValueError: the template refuses these messages, or fails on them; its words.
    """
    try:
        text = render_conversation(
            conversation.template,
            conversation.messages,
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            **conversation.variables,
        )
    except ValueError as problem:
        raise ValueError(str(problem)[:_MOST_SAID]) from problem
    return Rendered(text if len(text) <= conversation.longest else None, len(text))
