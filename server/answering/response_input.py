"""Checks the input items of /v1/responses and converts them to messages of a conversation."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from server.answering.reading import (
    MAX_ID,
    Ignored,
    PartReader,
    SentPicture,
    fail,
    list_parts,
    read_parts,
    read_text,
    seen,
    text_in,
    unseen,
)
from server.answering.response_tools import as_arguments, function_name
from server.api.structure import check_value
from server.api.template_fields import FUNCTION_NAME
from server.errors import shown

Item = dict[str, Any]

_ROLES = ("system", "developer", "user", "assistant")
_TEXT = text_in("text")


def _address(part: Mapping[str, Any], where: str) -> str | None:
    """The address of an image part; None for a file that only OpenAI has."""
    given = part.get("image_url")
    if given is None and part.get("file_id") is not None:
        return None
    if isinstance(given, dict):  # as in chats
        given = given.get("url")
    return read_text({"image_url": given}, "image_url", where)


_GIVEN: dict[str, PartReader] = {
    "input_text": _TEXT,
    "output_text": _TEXT,
    "text": _TEXT,
    "input_image": seen(_address),
    "input_file": unseen("A file"),
    "input_audio": unseen("A piece of sound"),
}
_SAID = {**_GIVEN, "refusal": text_in("refusal")}
_NAME = re.compile(FUNCTION_NAME, re.ASCII)
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)
_REASONING = {"reasoning_text": _TEXT, "summary_text": _TEXT, "text": _TEXT}
# Items of tools that ran elsewhere. For those in the second row the client has the result, as a separate item.
_RAN_AT_OPENAI = ("web_search_call", "file_search_call", "code_interpreter_call", "mcp_call")
_RAN_AT_CLIENT = ("shell_call", "local_shell_call", "apply_patch_call")
_RESULTS = ("output", "outputs", "results", "error")
# Images, and approvals of tools that do not exist here; they contain no text.
_LEFT_OUT = (
    "image_generation_call", "computer_call", "computer_call_output", "mcp_list_tools", "mcp_approval_request",
    "mcp_approval_response",
)  # fmt: skip


def read_items(given: Any, ignored: Ignored, name: str = "input") -> list[Item]:
    """The input as items of a uniform form: with a type and an id, and content as lists of parts. `name`: the field
    that contains them. Raises ApiError: names the first invalid item."""
    if isinstance(given, str):
        if not given:
            fail(name, f"{name} must not be empty.")
        return [_message({"role": "user", "content": given}, name, ignored)]
    if not isinstance(given, list):
        fail(name, f"{name} must be a string or a list of items, got {shown(given)}.")
    if not given:
        fail(name, f"{name} must hold at least one item, got an empty list.")
    items = (_read_item(item, f"{name}[{index}]", ignored) for index, item in enumerate(given))
    return [item for item in items if item is not None]


def _read_item(item: Any, where: str, ignored: Ignored) -> Item | None:
    if not isinstance(item, dict):
        fail(where, f"{where} must be an object such as a message with role and content, got {shown(item)}.")
    kind = item.get("type")
    if kind is None and "role" in item:
        kind = "message"
    if kind in _LEFT_OUT:
        ignored.add(f"input.{kind}")
        return None
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        known = ", ".join(_READERS)
        message = f"{where}.type is {shown(kind)}, which is not supported; input items may be {known}."
        fail(f"{where}.type", message, code="unsupported_parameter")
    return read(item, where, ignored)


def _id(item: Mapping[str, Any], prefix: str, where: str) -> str:
    given = item.get("id")
    if given is None:
        return f"{prefix}{uuid.uuid4().hex}"
    if not isinstance(given, str) or not _ID.fullmatch(given):
        fail(f"{where}.id", f"{where}.id must be 1 to 128 of the characters a-z A-Z 0-9 _ -, got {shown(given)}.")
    return given


def _message(item: Mapping[str, Any], where: str, ignored: Ignored) -> Item:
    role = item.get("role")
    if role not in _ROLES:
        fail(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}, got {shown(role)}.")
    if item.get("content") == []:
        fail(f"{where}.content", f"{where}.content must be a string or a non-empty list of parts, got [].")
    said = role == "assistant"
    if said:
        text = read_parts(item.get("content"), f"{where}.content", _SAID, ignored)
        content: list[Item] = [{"type": "output_text", "text": text, "annotations": []}]
    else:
        content = _kept(list_parts(item.get("content"), f"{where}.content", _GIVEN, ignored))
    return {
        "type": "message", "id": _id(item, "msg_", where), "status": "completed", "role": role, "content": content,
    }  # fmt: skip


def _call(item: Mapping[str, Any], where: str, ignored: Ignored) -> Item:
    name = read_text(item, "name", where)
    if not _NAME.fullmatch(name):
        fail(f"{where}.name", f"{where}.name must match {FUNCTION_NAME}, got {shown(name)}.")
    return {
        "type": "function_call", "id": _id(item, "fc_", where), "status": "completed",
        "call_id": read_text(item, "call_id", where, least=1, most=MAX_ID), "name": name,
        "arguments": read_text(item, "arguments", where), **_namespace(item, where),
    }  # fmt: skip


def _custom_call(item: Mapping[str, Any], where: str, ignored: Ignored) -> Item:
    return {
        "type": "custom_tool_call", "id": _id(item, "ctc_", where), "status": "completed",
        "call_id": read_text(item, "call_id", where, least=1, most=MAX_ID), "name": read_text(item, "name", where),
        "input": read_text(item, "input", where), **_namespace(item, where),
    }  # fmt: skip


def _namespace(item: Mapping[str, Any], where: str) -> Item:
    return {} if item.get("namespace") is None else {"namespace": read_text(item, "namespace", where, most=MAX_ID)}


def _output(item: Mapping[str, Any], where: str, ignored: Ignored) -> Item:
    return {
        "type": item["type"], "id": _id(item, "fco_", where), "status": "completed",
        "call_id": read_text(item, "call_id", where, least=1, most=MAX_ID),
        "output": _output_of(list_parts(item.get("output"), f"{where}.output", _GIVEN, ignored)),
    }  # fmt: skip


def _kept(parts: list[str]) -> list[Item]:
    """The parts of an item: texts and images in order. Without images, all texts become one part."""
    if not any(isinstance(part, SentPicture) for part in parts):
        parts = ["\n".join(parts)]
    return [
        {"type": "input_image", "image_url": str(part), "detail": "auto"}
        if isinstance(part, SentPicture)
        else {"type": "input_text", "text": part}
        for part in parts
    ]


def _output_of(parts: list[str]) -> str | list[Item]:
    kept = _kept(parts)
    return kept if len(kept) > 1 or kept[0]["type"] == "input_image" else str(kept[0]["text"])


def _elsewhere(item: Mapping[str, Any], where: str, ignored: Ignored) -> Item:
    """A call of one of OpenAI's own tools, or the client's response to one. It is kept unchanged."""
    check_value(dict(item), where)
    kept: Item = {**item, "id": _id(item, "ran_", where)}
    if item["type"] not in _RAN_AT_OPENAI:
        name = "call_id" if "call_id" in item else "id"  # for a local shell's result
        kept["call_id"] = read_text(item, name, where, least=1, most=MAX_ID)
    return kept


def _additional_tools(item: Mapping[str, Any], where: str, ignored: Ignored) -> Item:
    given = item.get("tools")
    if not isinstance(given, list):
        fail(f"{where}.tools", f"{where}.tools must be a list of tools, got {shown(given)}.")
    check_value(given, f"{where}.tools")
    return {"type": "additional_tools", "id": _id(item, "at_", where), "role": "developer", "tools": given}


def _reasoning(item: Mapping[str, Any], where: str, ignored: Ignored) -> Item:
    name = "content" if item.get("content") else "summary"
    text = read_parts(item.get(name) or [], f"{where}.{name}", _REASONING, ignored)
    if item.get("encrypted_content") and not text:
        ignored.add("input.encrypted_content")
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
        "type": "reasoning", "id": _id(item, "rs_", where), "status": "completed", "summary": [], "content": content,
    }  # fmt: skip


_READERS = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "additional_tools": _additional_tools,
    **dict.fromkeys((*_RAN_AT_OPENAI, *_RAN_AT_CLIENT), _elsewhere),
    **{f"{kind}_output": _elsewhere for kind in _RAN_AT_CLIENT},
    "reasoning": _reasoning,
}


def to_messages(items: Iterable[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages for a chat request.

    Successive reasoning, text and calls form one assistant message. `items`: as returned by `read_items`, or from an
    answer's output.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif kind == "message":
            _said(messages, "content")["content"] = _text(item["content"])
        elif kind == "reasoning":
            if item["content"]:
                _said(messages, "reasoning_content")["reasoning_content"] = _text(item["content"])
        elif kind in ("function_call", "custom_tool_call"):
            arguments = item["arguments"] if kind == "function_call" else as_arguments(item["input"])
            _add_call(messages, item["call_id"], function_name(item["name"], item.get("namespace")), arguments)
        elif kind in _RAN_AT_OPENAI or kind in _RAN_AT_CLIENT:
            _add_elsewhere(messages, item)
        elif kind != "additional_tools":
            result: Any = item.get("output") or item.get("status") or ""  # for a patch, perhaps only this
            images = isinstance(result, list) and any(_is_image(part) for part in result)
            result = _content(result) if images else _as_text(result)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": result})
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message.setdefault("content", "")
    return messages


def _add_call(messages: list[dict[str, Any]], id_: str, name: str, arguments: str) -> None:
    call = {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
    _said(messages, "tool_calls").setdefault("tool_calls", []).append(call)


def _add_elsewhere(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    id_, kind = item.get("call_id") or item["id"], item["type"]
    said = {name: value for name, value in item.items() if name not in ("type", "id", "call_id", "status", *_RESULTS)}
    _add_call(messages, id_, kind.removesuffix("_call"), json.dumps(said, ensure_ascii=False))
    if kind in _RAN_AT_OPENAI:
        results = [item[name] for name in _RESULTS if item.get(name)] or [item.get("status") or "completed"]
        messages.append({"role": "tool", "tool_call_id": id_, "content": "\n".join(map(_as_text, results))})


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_ORDER = ("reasoning_content", "content", "tool_calls")


def _said(
    messages: list[dict[str, Any]], name: Literal["reasoning_content", "content", "tool_calls"]
) -> dict[str, Any]:
    """The assistant message to which this can be added: reasoning comes before text, and text before calls."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant":
        held = [position for position, field in enumerate(_ORDER) if field in last]
        place = _ORDER.index(name)
        if held[-1] < place or (name == "tool_calls" and held[-1] == place):
            return last
    messages.append({"role": "assistant"})
    return messages[-1]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _content(content: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    if not any(map(_is_image, content)):
        return _text(content)
    return [
        {"type": "image_url", "image_url": {"url": part["image_url"]}}
        if _is_image(part)
        else {"type": "text", "text": part["text"]}
        for part in content
    ]


def _text(content: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in content)
