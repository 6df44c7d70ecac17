"""Chat templates, rendered as `transformers` does it: the job of a worker."""

from __future__ import annotations

from typing import Any

import msgspec
from transformers.utils.chat_template_utils import render_jinja_template


class Conversation(msgspec.Struct, array_like=True):
    """What is rendered.

    Attributes:
        template: a Jinja template.
        messages: {"role": ..., "content": ...} each.
        variables: further names that the template may use: the tokenizer's special tokens.
        add_generation_prompt: end with what opens the assistant's answer.
        longest: characters of the text; of a longer one only the length is told.
    """

    template: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    add_generation_prompt: bool
    longest: int


class Rendered(msgspec.Struct, array_like=True):
    """The text, or None where it is too long; and how many characters it has."""

    text: str | None
    length: int


def render(conversation: Conversation) -> Rendered:
    """Messages to the text of a prompt, in the sandbox of `transformers`.

    Raises:
        ValueError: the template refuses these messages, or fails on them; its words.
    """
    try:
        texts, _ = render_jinja_template(
            conversations=[conversation.messages],
            chat_template=conversation.template,
            add_generation_prompt=conversation.add_generation_prompt,
            **conversation.variables,
        )
    except MemoryError:
        raise
    except Exception as problem:  # a template may fail in any way on messages that it was not made for
        raise ValueError(str(problem) or type(problem).__name__) from problem
    text = str(texts[0])
    return Rendered(text if len(text) <= conversation.longest else None, len(text))
