"""The input of /v1/responses: items, checked, and as the messages of a conversation."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from server.answering.reading import MAX_ID, fail, read_parts, read_text
from server.api.template_fields import FUNCTION_NAME
from server.errors import shown

Item = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant")
_GIVEN = {"input_text": "text", "text": "text"}
_SAID = {"output_text": "text", "refusal": "refusal", "input_text": "text", "text": "text"}
_NAME = re.compile(FUNCTION_NAME, re.ASCII)
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)
_REASONING = {"reasoning_text": "text", "text": "text"}


def read_items(given: Any) -> list[Item]:
    """The input as items of one form each: with a type and an id, contents as lists of parts.

    Raises:
        ApiError: names the first thing that is wrong.
    """
    if isinstance(given, str):
        if not given:
            fail("input", "input must not be empty.")
        return [_message({"role": "user", "content": given}, "input")]
    if not isinstance(given, list):
        fail("input", f"input must be a string or a list of items, got {shown(given)}.")
    if not given:
        fail("input", "input must hold at least one item, got an empty list.")
    return [_read_item(item, f"input[{index}]") for index, item in enumerate(given)]


def _read_item(item: Any, where: str) -> Item:
    if not isinstance(item, dict):
        fail(where, f"{where} must be an object such as a message with role and content, got {shown(item)}.")
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        known = ", ".join(_READERS)
        message = f"{where}.type is {shown(kind)}, which is not supported; input items may be {known}."
        fail(f"{where}.type", message, code="unsupported_parameter")
    return read(item, where)


def _id(item: Mapping[str, Any], prefix: str, where: str) -> str:
    given = item.get("id")
    if given is None:
        return f"{prefix}{uuid.uuid4().hex}"
    if not isinstance(given, str) or not _ID.fullmatch(given):
        fail(f"{where}.id", f"{where}.id must be 1 to 128 of the characters a-z A-Z 0-9 _ -, got {shown(given)}.")
    return given


def _message(item: Mapping[str, Any], where: str) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        fail(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}.")
    if item.get("content") == []:
        fail(f"{where}.content", f"{where}.content must be a string or a non-empty list of parts, got [].")
    said = role == "assistant"
    text = read_parts(item.get("content"), f"{where}.content", _SAID if said else _GIVEN)
    part = {"type": "output_text", "text": text, "annotations": []} if said else {"type": "input_text", "text": text}
    return {
        "type": "message", "id": _id(item, "msg_", where), "status": "completed", "role": role, "content": [part],
    }  # fmt: skip


def _call(item: Mapping[str, Any], where: str) -> Item:
    name = read_text(item, "name", where)
    if not _NAME.fullmatch(name):
        fail(f"{where}.name", f"{where}.name must match {FUNCTION_NAME}, got {shown(name)}.")
    return {
        "type": "function_call", "id": _id(item, "fc_", where), "status": "completed",
        "call_id": read_text(item, "call_id", where, least=1, most=MAX_ID), "name": name,
        "arguments": read_text(item, "arguments", where),
    }  # fmt: skip


def _output(item: Mapping[str, Any], where: str) -> Item:
    return {
        "type": "function_call_output", "id": _id(item, "fco_", where), "status": "completed",
        "call_id": read_text(item, "call_id", where, least=1, most=MAX_ID),
        "output": read_parts(item.get("output"), f"{where}.output", _GIVEN),
    }  # fmt: skip


def _reasoning(item: Mapping[str, Any], where: str) -> Item:
    if item.get("encrypted_content"):
        message = f"{where}.encrypted_content cannot be read: reasoning comes and goes as content of reasoning items."
        fail(f"{where}.encrypted_content", message, code="unsupported_parameter")
    text = read_parts(item.get("content") or [], f"{where}.content", _REASONING)
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
        "type": "reasoning", "id": _id(item, "rs_", where), "status": "completed", "summary": [], "content": content,
    }  # fmt: skip


_READERS = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "reasoning": _reasoning,
}


def to_messages(items: Iterable[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat request.

    Reasoning, text and calls that follow one another are one message of the assistant.

    Args:
        items: as `read_items` gives them, or as an answer's output has them.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _text(item["content"])})
        elif kind == "message":
            _said(messages, "content")["content"] = _text(item["content"])
        elif kind == "reasoning":
            if item["content"]:
                _said(messages, "reasoning_content")["reasoning_content"] = _text(item["content"])
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            _said(messages, "tool_calls").setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message.setdefault("content", "")
    return messages


_ORDER = ("reasoning_content", "content", "tool_calls")


def _said(
    messages: list[dict[str, Any]], name: Literal["reasoning_content", "content", "tool_calls"]
) -> dict[str, Any]:
    """The assistant's message that may still be given this: reasoning comes before text, and text before calls."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant":
        held = [position for position, field in enumerate(_ORDER) if field in last]
        place = _ORDER.index(name)
        if held[-1] < place or (name == "tool_calls" and held[-1] == place):
            return last
    messages.append({"role": "assistant"})
    return messages[-1]


def _text(content: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in content)
