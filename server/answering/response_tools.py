"""Converts the tools of /v1/responses to functions of the chat path, and calls back to the names that the client
knows."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from server.answering.lark_regex import lark_to_regex
from server.answering.reading import Ignored, fail, read_text
from server.api.structure import check_value
from server.api.template_fields import MAX_FUNCTION_NAME
from server.errors import shown

logger = logging.getLogger("octavo.server")

Tool = Mapping[str, Any]

_BETWEEN = "__"  # a namespace and a name, as in names of MCP tools
_INPUT = "input"  # the only argument of a custom tool's function
MAX_FUNCTIONS = 512  # maximum functions of a request, including those in namespaces
_MOST_GRAMMAR = 200_000  # maximum characters of all grammars of a request and of their regular expressions
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


class Called(NamedTuple):
    """A client's name for a function."""

    name: str
    namespace: str | None = None
    custom: bool = False


class ResponseTools:
    """The tools of one request. `ignored`: receives the names of tools that would run at OpenAI."""

    def __init__(self, ignored: Ignored):
        self._ignored = ignored
        self._chat: dict[str, dict[str, Any]] = {}
        self._called: dict[str, Called] = {}
        self._patterns: dict[str, str | None] = {}  # as enforced by the grammar; None if it is not enforced
        self._grammar_room = _MOST_GRAMMAR
        self.shown: list[dict[str, Any]] = []  # the callable tools of the request, as the answer repeats them
        # enforced schemas of arguments by function name, if they differ from those that the model sees
        self.enforced: dict[str, dict[str, Any]] = {}

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The tools in the chat path's form."""
        return list(self._chat.values())

    def name_of(self, function: str) -> Called:
        """The client's name for a function; the model may also call an unknown function."""
        return self._called.get(function) or Called(function)

    def add(self, tool: Any, where: str, *, namespace: str | None = None, again: bool = False) -> bool:
        """Add a tool. Raises ApiError: names the invalid part.

        Args:
            where: the tool's path.
            again: it may have come before; the newer one counts.

        Returns: Whether it contains something callable.
        """
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            fail(where, f'{where} must be an object such as {{"type": "function", "name": ...}}, got {shown(tool)}.')
        kind = tool["type"]
        if kind == "namespace" and namespace is None:
            return self._add_namespace(tool, where, again=again)
        if kind not in ("function", "custom"):
            self._ignored.add(f"tools.{kind}")
            return False
        if "name" not in tool and isinstance(tool.get("function"), dict):
            fail(where, f"{where} has the form of /v1/chat/completions; here name and parameters stand beside type.")
        called = Called(read_text(tool, "name", where, most=MAX_FUNCTION_NAME), namespace, kind == "custom")
        name = function_name(called.name, namespace)
        if name in self._called and not again:
            fail("tools", f"tools holds two functions named {shown(name)}; a call could not tell them apart.")
        fields = _custom(tool, where) if called.custom else tool
        function = {field: fields[field] for field in _FUNCTION_FIELDS if fields.get(field) is not None}
        self.enforced.pop(name, None)
        if called.custom and (pattern := self._pattern(tool)) is not None:
            self.enforced[name] = _input_schema({"type": "string", "pattern": f"^(?:{pattern})$"})
        self._called[name] = called
        self._chat[name] = {"type": "function", "function": {**function, "name": name}}
        return True

    def _pattern(self, tool: Tool) -> str | None:
        """The regular expression that a custom tool's input must match."""
        format_ = tool.get("format") or {}
        if format_.get("type") != "grammar":
            return None
        if format_["syntax"] == "regex":
            return str(format_["definition"])
        grammar = format_["definition"]
        if grammar not in self._patterns:
            self._patterns[grammar] = self._expression(grammar)
        if self._patterns[grammar] is None:
            self._ignored.add(f"tools.{tool['name']}.format")
        return self._patterns[grammar]

    def _expression(self, grammar: str) -> str | None:
        try:
            if len(grammar) > self._grammar_room:
                raise ValueError(f"the grammars of the request have more than {_MOST_GRAMMAR} characters together")
            self._grammar_room -= len(grammar)
            pattern = lark_to_regex(grammar)
            self._grammar_room -= len(pattern)
        except (ValueError, RecursionError) as problem:
            logger.info("The format of a custom tool is not enforced: %s.", problem)
            return None
        return pattern

    def _add_namespace(self, tool: Tool, where: str, *, again: bool) -> bool:
        name, inner = read_text(tool, "name", where, least=1, most=MAX_FUNCTION_NAME), tool.get("tools")
        if not isinstance(inner, list):
            fail(f"{where}.tools", f"{where}.tools must be a list of tools, got {shown(inner)}.")
        places = ((item, f"{where}.tools[{index}]") for index, item in enumerate(inner))
        added = [self.add(item, place, namespace=name, again=again) for item, place in places]
        return any(added)


def read_response_tools(given: Sequence[Any], items: Iterable[Mapping[str, Any]], ignored: Ignored) -> ResponseTools:
    """The tools of a request. Raises ApiError: names the first invalid tool.

    Args:
        given: the field `tools`.
        items: the conversation's items; those of type additional_tools add tools.
        ignored: receives the names of tools that would run at OpenAI.
    """
    tools = ResponseTools(ignored)
    check_value(list(given), "tools")
    for index, tool in enumerate(given):
        if tools.add(tool, f"tools[{index}]"):
            tools.shown.append(_repeated(tool))
    for item in items:
        for index, tool in enumerate(item["tools"] if item["type"] == "additional_tools" else ()):
            tools.add(tool, f"input.additional_tools.tools[{index}]", again=True)
    if (count := len(tools.chat)) > MAX_FUNCTIONS:
        fail("tools", f"tools may have at most {MAX_FUNCTIONS} functions with those in namespaces, got {count}.")
    return tools


def _repeated(tool: Tool) -> dict[str, Any]:
    return {name: tool.get(name) for name in ("type", *_FUNCTION_FIELDS)} if tool["type"] == "function" else dict(tool)


def _custom(tool: Tool, where: str) -> dict[str, Any]:
    described = [read_text(tool, "description", where)] if tool.get("description") is not None else []
    format_, place = tool.get("format") or {"type": "text"}, f"{where}.format"
    if not isinstance(format_, dict) or format_.get("type") not in ("text", "grammar"):
        fail(place, f'{place} must be {{"type": "text"}} or {{"type": "grammar", ...}}, got {shown(format_)}.')
    if format_["type"] == "grammar":
        if format_.get("syntax") not in ("lark", "regex"):
            fail(f"{place}.syntax", f"{place}.syntax must be lark or regex, got {shown(format_.get('syntax'))}.")
        described.append(f"The input has this form ({format_['syntax']}):\n{read_text(format_, 'definition', place)}")
    parameters = _input_schema({"type": "string", "description": "All of the text that the tool gets."})
    return {"description": "\n".join(described) or None, "parameters": parameters}


def _input_schema(text: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}


def function_name(name: str, namespace: str | None = None) -> str:
    """The name of the function for a tool, which may be in a namespace. If it is too long, the namespace is
    shortened."""
    if not namespace:
        return name
    room = max(MAX_FUNCTION_NAME - len(_BETWEEN) - len(name), 0)
    return f"{namespace.rstrip('_')[:room]}{_BETWEEN}{name}"


def as_arguments(text: str) -> str:
    """A custom tool's input as arguments of its function."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def as_input(arguments: str) -> str:
    """The reverse of `as_arguments`. Any other output of the model stays unchanged."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    text = value.get(_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
