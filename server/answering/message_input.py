"""Converts a request of /v1/messages to a chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from server.answering.public_names import chat_request
from server.answering.reading import (
    MAX_ID,
    Ignored,
    PartReader,
    fail,
    joined,
    list_parts,
    read_part,
    read_parts,
    read_text,
    seen,
    text_in,
    unseen,
)
from server.api.chat_schemas import ChatCompletionRequest
from server.api.fields import refuse_unsupported
from server.api.message_schemas import CountTokensRequest, MessageRequest
from server.api.response_schemas import ONE_ANSWER_FIELDS
from server.api.schemas import MAX_MESSAGES, ServedBody
from server.api.structure import check_value
from server.api.template_fields import FUNCTION_NAME
from server.errors import shown

# This endpoint's names for a chat request's fields.
NAMES = {
    "max_completion_tokens": "max_tokens",
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "reasoning_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice",
    "tools.parameters": "input_schema",
}
_UNSUPPORTED = ("n", "best_of", "use_beam_search", "stop")
_TERMS = tuple(name for name in (*ServedBody.model_fields, *ONE_ANSWER_FIELDS) if name != "stop")
_NAME = re.compile(FUNCTION_NAME, re.ASCII)
_CHOICES = ("auto", "any", "tool", "none")
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
# Fields of Anthropic's service without effect here.
_HARMLESS = frozenset({"cache_control", "service_tier", "inference_geo", "diagnostics", "speed", "user_profile_id"})
# Claude Code's first system block. It identifies the client and differs between conversations, so it would keep the
# rest of the prompt out of the prefix cache.
_BILLING = "x-anthropic-billing-header:"


def _document(part: Mapping[str, Any], where: str, ignored: Ignored) -> str:
    source: Any = part.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text":
        text = read_text(source, "data", f"{where}.source")
    elif kind == "content":
        text = read_parts(source.get("content"), f"{where}.source.content", _SHOWN, ignored)
    else:
        text = unseen("A document")(part, where, ignored)
    named = [part[name] for name in ("title", "context") if isinstance(part.get(name), str)]
    return "\n".join([*named, text])


def _search_result(part: Mapping[str, Any], where: str, ignored: Ignored) -> str:
    named = [read_text(part, name, where) for name in ("title", "source")]
    return "\n".join([*named, read_parts(part.get("content"), f"{where}.content", _SHOWN, ignored)])


_TEXT: dict[str, PartReader] = {"text": text_in("text")}


def _source(part: Mapping[str, Any], where: str) -> str | None:
    """The address of an image block; None for a file that only Anthropic has."""
    source: Any = part.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "base64":
        media = read_text(source, "media_type", f"{where}.source", most=MAX_ID)
        return f"data:{media};base64,{read_text(source, 'data', f'{where}.source')}"
    if kind == "url":
        return read_text(source, "url", f"{where}.source")
    if kind == "file":
        return None
    fail(f"{where}.source", f"{where}.source must be an object of the type base64, url or file; got {shown(source)}.")


_SHOWN: dict[str, PartReader] = {**_TEXT, "image": seen(_source)}
_GIVEN: dict[str, PartReader] = {
    **_SHOWN,
    "document": _document,
    "search_result": _search_result,
    "tool_reference": text_in("tool_name"),
    "container_upload": unseen("A file"),
}
_READERS = {"system": _TEXT, "user": _GIVEN, "assistant": {**_TEXT, "compaction": text_in("content")}}
_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")


def read_chat(body: MessageRequest, ignored: Ignored) -> ChatCompletionRequest:
    """The equivalent chat request. `ignored`: receives the names of ignored parts. Raises ApiError if the request is
    invalid or not supported."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _TERMS if getattr(body, name) is not None}
    fields |= {"stream": bool(body.stream), "max_completion_tokens": body.max_tokens}
    if body.stop_sequences:
        fields["stop"] = body.stop_sequences
    return chat_request(fields | _prompt_fields(body, ignored), NAMES)


def read_prompt(body: CountTokensRequest, ignored: Ignored) -> ChatCompletionRequest:
    """A chat request with the same prompt. `ignored`: receives the names of ignored parts. Raises ApiError if the
    request is invalid or not supported."""
    return chat_request(_prompt_fields(body, ignored), NAMES)


def _ignored_fields(body: MessageRequest | CountTokensRequest) -> list[str]:
    given = [name for name in body.ignored_fields() if getattr(body, name) is not None]
    unknown = [name for name in given if name not in _HARMLESS]
    thinking = [f"thinking.{name}" for name in body.thinking or () if name not in ("type", "display", "budget_tokens")]
    config = [f"output_config.{name}" for name in body.output_config or () if name not in ("effort", "format")]
    return unknown + thinking + config


def _prompt_fields(body: MessageRequest | CountTokensRequest, ignored: Ignored) -> dict[str, Any]:
    unknown = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    for name in _UNSUPPORTED:
        if name in unknown:
            fail(name, f"{name} is not supported. Remove it.", code="unsupported_parameter")
    refuse_unsupported(unknown)
    ignored.update(_ignored_fields(body))
    messages = _read_messages(body.messages, ignored)
    fields: dict[str, Any] = {}
    if messages[-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    if system := _read_system(body.system, ignored):
        messages.insert(0, {"role": "system", "content": system})
    if len(messages) > MAX_MESSAGES:
        fail("messages", f"messages has {len(messages)} messages and results, but at most {MAX_MESSAGES} are allowed.")
    fields["messages"] = messages
    if body.tools:
        check_value(body.tools, "tools")
        tools = (_chat_tool(tool, f"tools[{index}]", ignored) for index, tool in enumerate(body.tools))
        fields["tools"] = [tool for tool in tools if tool is not None]
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        kind = body.thinking.get("type")
        if not isinstance(kind, str) or kind not in _THINKING:
            wanted = "enabled, adaptive or disabled"
            fail("thinking.type", f"thinking.type must be {wanted}, got {shown(kind)}.")
        variables.setdefault("enable_thinking", _THINKING[kind])
        if _THINKING[kind] and body.thinking.get("budget_tokens") is not None:
            fields["reasoning_budget"] = body.thinking["budget_tokens"]
    if variables:
        fields["chat_template_kwargs"] = variables
    choice = _read_choice(body.tool_choice)
    if not fields.get("tools") and choice.get("tool_choice") == "auto":
        del choice["tool_choice"]  # there are none, or all were ignored
    return fields | choice | _read_config(body.output_config)


def _read_system(given: Any, ignored: Ignored) -> str:
    if isinstance(given, list):
        given = [block for block in given if not _is_billing(block)]
    return "" if given is None else read_parts(given, "system", _TEXT, ignored)


def _is_billing(block: Any) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith(_BILLING)


def _chat_tool(tool: Any, where: str, ignored: Ignored) -> dict[str, Any] | None:
    """A tool that the client runs; None for a tool that runs or is defined at Anthropic."""
    if not isinstance(tool, dict):
        fail(where, f"{where} must be an object with name and input_schema, got {shown(tool)}.")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        if not isinstance(kind, str):
            fail(f"{where}.type", f"{where}.type must be a string, got {shown(kind)}.")
        ignored.add(f"tools.{kind}")
        return None
    if not isinstance(tool.get("input_schema"), dict):
        message = f"{where}.input_schema must be a JSON schema, which is an object, got "
        fail(f"{where}.input_schema", f"{message}{shown(tool.get('input_schema'))}.")
    names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
    function = {chat: tool[name] for name, chat in names.items() if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _read_choice(choice: Mapping[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind not in _CHOICES:
        fail("tool_choice.type", f"tool_choice.type must be one of {', '.join(_CHOICES)}, got {shown(kind)}.")
    fields: dict[str, Any] = {"tool_choice": "required" if kind == "any" else kind}
    if kind == "tool":
        name = read_text(choice, "name", "tool_choice", most=64)
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    single = choice.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        name = "tool_choice.disable_parallel_tool_use"
        fail(name, f"{name} must be true or false, got {shown(single)}.")
    if single:
        fields["parallel_tool_calls"] = False
    return fields


def _read_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    given = config or {}
    if given.get("effort") is not None:
        fields["reasoning_effort"] = read_text(given, "effort", "output_config", least=1, most=64)
    format_ = given.get("format")
    if format_ is None:
        return fields
    where = "output_config.format"
    if not isinstance(format_, dict) or format_.get("type") != "json_schema":
        fail(where, f'{where} must be {{"type": "json_schema", "schema": ...}}, got {shown(format_)}.')
    if not isinstance(format_.get("schema"), dict):
        fail(f"{where}.schema", f"{where}.schema must be an object, got {shown(format_.get('schema'))}.")
    check_value(format_, where)
    schema = {"name": "answer", "schema": format_["schema"], "strict": True}
    return fields | {"response_format": {"type": "json_schema", "json_schema": schema}}


def _read_messages(given: Sequence[Any], ignored: Ignored) -> list[dict[str, Any]]:
    """The messages of a chat request. Successive messages of one role (user, assistant, system) become one message."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(item, dict):
            fail(where, f"{where} must be an object with role and content, got {shown(item)}.")
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or role not in _READERS:
            fail(f"{where}.role", f"{where}.role must be user, assistant or system, got {shown(role)}.")
        if isinstance(content, str):
            blocks: list[Any] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and content:
            blocks = content
        else:
            wanted = f"{where}.content must be a string or a non-empty list of blocks"
            fail(f"{where}.content", f"{wanted}, got {shown(content)}.")
        placed = [(block, f"{where}.content[{place}]") for place, block in enumerate(blocks)]
        if role == "user":
            placed.sort(key=lambda one: not _is_result(one[0]))  # templates expect a result right after its call
        last_call = max((at for at, (block, _) in enumerate(placed) if _is_call(block)), default=None)
        for at, (block, place) in enumerate(placed):
            if role == "assistant" and last_call is not None and at > last_call and _is_text(block):
                messages.append({"role": role})  # text after the last call becomes a separate message
                last_call = None
            _add(messages, role, block, place, ignored)
    if not messages:
        fail("messages", f"messages must contain at least one message with content, got {len(given)}.")
    for said in messages:
        for name in ("reasoning_content", "content"):
            if isinstance(said.get(name), list) and said["role"] != "tool":
                said[name] = joined(said[name])
        if not said.get("tool_calls"):
            said.setdefault("content", "")
    return messages


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _is_call(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") in _CALLS


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text"


def _add(messages: list[dict[str, Any]], role: str, block: Any, where: str, ignored: Ignored) -> None:
    """Add a block.

    Texts are collected in lists and joined once, at the end.
    """
    kind: Any = block.get("type") if isinstance(block, dict) else None
    said = isinstance(kind, str) and role == "assistant"
    if kind == "tool_result" and role == "user":
        if block.get("is_error"):
            ignored.add("messages.is_error")  # no template supports it
        parts = list_parts(block.get("content") or "", f"{where}.content", _GIVEN, ignored)
        _add_result(messages, block, joined(parts), where)
    elif said and kind in _CALLS:
        _last(messages, role).setdefault("tool_calls", []).append(_chat_call(block, where))
    elif said and kind.endswith("_tool_result"):  # its tool ran at Anthropic
        check_value(block.get("content"), f"{where}.content")
        _add_result(messages, block, json.dumps(_readable(block.get("content")), ensure_ascii=False), where)
    elif said and kind == "thinking":
        _last(messages, role).setdefault("reasoning_content", []).append(read_text(block, "thinking", where))
    elif said and kind == "redacted_thinking":
        ignored.add("messages.redacted_thinking")
    else:
        text = read_part(block, where, _READERS[role], ignored)
        _last(messages, role).setdefault("content", []).append(text)


def _add_result(messages: list[dict[str, Any]], block: Mapping[str, Any], content: Any, where: str) -> None:
    id_ = read_text(block, "tool_use_id", where, least=1, most=MAX_ID)
    messages.append({"role": "tool", "tool_call_id": id_, "content": content})


def _readable(value: Any) -> Any:
    """A result without the fields that only Anthropic can read."""
    if isinstance(value, dict):
        return {name: _readable(item) for name, item in value.items() if not name.startswith("encrypted_")}
    return [_readable(item) for item in value] if isinstance(value, list) else value


def _last(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role})
    return messages[-1]


def _chat_call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = read_text(block, "name", where)
    if not _NAME.fullmatch(name):
        fail(f"{where}.name", f"{where}.name must match {FUNCTION_NAME}, got {shown(name)}.")
    given = block.get("input")
    if not isinstance(given, dict):
        fail(f"{where}.input", f"{where}.input must be an object, got {shown(given)}.")
    check_value(given, f"{where}.input")
    arguments = json.dumps(given, ensure_ascii=False)
    id_ = read_text(block, "id", where, least=1, most=MAX_ID)
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
