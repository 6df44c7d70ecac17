"""Checks the messages of a conversation and converts them for chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from engine.text.pictures import Pictures
from server.admission import estimate_tokens
from server.api.chat_schemas import MAX_CALLS
from server.api.template_fields import FUNCTION_NAME
from server.errors import ApiError, shown

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
# Unsupported fields of a message that would change the prompt.
_UNSUPPORTED = ("function_call", "audio")
_MAX_ID = 256  # maximum characters of a call's id
_NAME = re.compile(FUNCTION_NAME, re.ASCII)


def read_messages(given: Sequence[Any], pictures: Pictures | None = None) -> list[Message]:
    """Messages for templates: role, content as text, and the other fields of each role.

    An assistant message may have `reasoning_content` and `tool_calls`, whose arguments stay text; a tool message has
    `tool_call_id`. Text parts are joined with line breaks, because most templates do not support parts. `pictures`:
    gets the images, for which the texts have marks; None: the model reads none. Raises ApiError: names the first
    invalid part.
    """
    if not given:
        _fail("messages", "messages must hold at least one message, got an empty list.")
    return [_read_message(item, f"messages[{index}]", pictures) for index, item in enumerate(given)]


def estimate_messages(messages: Sequence[Message]) -> int:
    """An estimate of the number of tokens in the messages."""
    return sum(estimate_tokens(text) for message in messages for text in _texts(message))


def _texts(message: Message) -> list[str]:
    calls = (call["function"]["arguments"] for call in message.get("tool_calls", ()))
    return [message["content"], message.get("reasoning_content", ""), *calls]


def _read_message(item: Any, where: str, pictures: Pictures | None) -> Message:
    if not isinstance(item, dict):
        _fail(where, f"{where} must be an object with role and content, got {shown(item)}.")
    role = item.get("role")
    if role not in ROLES:
        _fail(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}.")
    for unsupported in _UNSUPPORTED:
        if item.get(unsupported):
            reason = f"{where}.{unsupported} is not supported. Remove it."
            _fail(f"{where}.{unsupported}", reason, code="unsupported_parameter")
    message: Message = {"role": role}
    calls = _read_calls(item, role, where)
    content = item.get("content")
    if content is None and calls:
        message["content"] = ""
    elif isinstance(content, list) and not content and role == "tool":
        message["content"] = ""  # a function without a result
    else:
        message["content"] = _read_content(content, f"{where}.content", pictures)
    if calls:
        message["tool_calls"] = calls
    if role == "assistant":
        message |= _read_reasoning(item, where)
    if role == "tool":
        message["tool_call_id"] = _read_text(item, "tool_call_id", where, most=_MAX_ID)
    if item.get("name") is not None:
        message["name"] = _read_text(item, "name", where)
    return message


def _read_calls(item: Mapping[str, Any], role: str, where: str) -> list[dict[str, Any]]:
    given, where = item.get("tool_calls"), f"{where}.tool_calls"
    if not given:
        return []
    if role != "assistant":
        _fail(where, f"{where} is only allowed with the role assistant, not with {role}.")
    if not isinstance(given, list) or len(given) > MAX_CALLS:
        held = f"{len(given)} calls" if isinstance(given, list) else shown(given)
        _fail(where, f"{where} must be a list of at most {MAX_CALLS} calls, got {held}.")
    return [_read_call(call, f"{where}[{index}]") for index, call in enumerate(given)]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        _fail(where, f"{where} must be an object with id, type and function, got {shown(call)}.")
    kind = call.get("type", "function")
    if kind != "function":
        message = f"{where}.type is {shown(kind)}, which is not supported; only 'function' is."
        _fail(f"{where}.type", message, code="unsupported_parameter")
    function = call["function"]
    name = _read_text(function, "name", f"{where}.function")
    if not _NAME.fullmatch(name):
        field = f"{where}.function.name"
        _fail(field, f"{field} must match {FUNCTION_NAME}, got {shown(name)}.")
    arguments = _read_text(function, "arguments", f"{where}.function")
    id_ = _read_text(call, "id", where, most=_MAX_ID)
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_reasoning(item: Mapping[str, Any], where: str) -> Message:
    """The reasoning under DeepSeek's name or vLLM's."""
    for name in ("reasoning_content", "reasoning"):
        if item.get(name) is not None:
            return {"reasoning_content": _read_text(item, name, where)}
    return {}


def _read_text(item: Mapping[str, Any], name: str, where: str, most: int | None = None) -> str:
    text, field = item.get(name), f"{where}.{name}"
    if not isinstance(text, str):
        _fail(field, f"{field} must be a string, got {shown(text)}.")
    if most is not None and len(text) > most:
        _fail(field, f"{field} may have at most {most} characters, got {len(text)}.")
    return text


def _read_content(content: Any, where: str, pictures: Pictures | None) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        _fail(where, f"{where} must be a string or a non-empty list of text parts, got {shown(content)}.")
    parts = [_read_part(part, f"{where}[{index}]", pictures) for index, part in enumerate(content)]
    return "\n".join(parts) if pictures is None else pictures.joined(parts)


def _read_part(part: Any, where: str, pictures: Pictures | None) -> str:
    if not isinstance(part, dict):
        _fail(where, f'{where} must be an object such as {{"type": "text", "text": "..."}}, got {shown(part)}.')
    kind = part.get("type")
    if kind == "image_url" and pictures is not None:
        return pictures.add(_read_url(part.get("image_url"), f"{where}.image_url"))
    if kind != "text":
        known = "only 'text' parts are" if pictures is None else "only 'text' and 'image_url' parts are"
        message = f"{where}.type is {shown(kind)}, which is not supported; {known}."
        _fail(f"{where}.type", message, code="unsupported_parameter")
    text = part.get("text")
    if not isinstance(text, str):
        _fail(f"{where}.text", f"{where}.text must be a string, got {shown(text)}.")
    return text


def _read_url(given: Any, where: str) -> str:
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        _fail(where, f'{where} must be an object such as {{"url": "data:image/png;base64,..."}}, got {shown(given)}.')
    return url


def _fail(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    raise ApiError(400, message, param=param, code=code)
