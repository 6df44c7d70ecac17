"""A chat request's `prediction` of its answer, which is a source of draft tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from engine.text.processor import Tokenizer
from server.answering.prompt import most_characters
from server.errors import ApiError, shown


def read_prediction(given: Mapping[str, Any] | None) -> str | None:
    """The predicted text; None if the request has none. Raises ApiError if it is not in OpenAI's form."""
    if given is None:
        return None
    if given.get("type") != "content":
        raise _wrong("prediction.type", f'must be "content", got {shown(given.get("type"))}')
    content = given.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise _wrong("prediction.content", f"must be a text or a list of text parts, got {shown(content)}")
    for place, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text:
            raise _wrong(f"prediction.content[{place}]", f'must be {{"type": "text", "text": ...}}, got {shown(part)}')
    return "".join(part["text"] for part in content)


async def encode_prediction(tokenizer: Tokenizer, text: str, most: int) -> list[int]:
    """The tokens of a predicted text, up to the most tokens that an answer can have. Raises InvalidRequestError if the
    text is not valid Unicode."""
    text = text[: most_characters(most)]
    return (await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False))[:most]


def _wrong(name: str, problem: str) -> ApiError:
    return ApiError(400, f"{name} {problem}.", param=name, code="invalid_value")
