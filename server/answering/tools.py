"""Checks the functions that an answer may call and converts them for chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from server.answering.argument_schemas import possible
from server.api.structure import check_value
from server.api.template_fields import FUNCTION_NAME, MAX_FUNCTION_NAME
from server.errors import ApiError, shown

_NAME = re.compile(FUNCTION_NAME, re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that an answer may call."""

    name: str  # unique in its request
    # a JSON schema of the arguments, an object; None if any arguments are allowed
    parameters: Mapping[str, Any] | None = None
    strict: bool = False  # the arguments must match that schema
    dropped: bool = False  # whether it had enums that nothing could match, which are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The functions of a request, and which of them its answer may call."""

    functions: tuple[Function, ...]
    shown: list[dict[str, Any]]  # the functions as the template gets them: {"type": "function", "function": {...}} each
    choice: str = "auto"  # auto, or required (at least one call)
    named: str | None = None  # the function that must be called, if any
    allowed: frozenset[str] | None = None  # the functions that may be called, if not all shown ones
    parallel: bool = True  # whether an answer may have several calls
    characters: int = 0  # the total characters of all strings in `shown`

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    @property
    def ignored(self) -> set[str]:
        """Names of the fields that cannot be enforced."""
        return {f"tools.{function.name}.enum" for function in self.functions if function.dropped}

    @property
    def callable(self) -> tuple[Function, ...]:
        """The functions that the answer may call."""
        only = self.allowed if self.named is None else (self.named,)
        return tuple(item for item in self.functions if only is None or item.name in only)

    def enforcing(self, schemas: Mapping[str, Mapping[str, Any]]) -> Tools:
        """The same tools, with these schemas for the arguments of these functions. The model sees the original ones."""
        functions = [
            replace(one, parameters=schemas[one.name], strict=True) if one.name in schemas else one
            for one in self.functions
        ]
        return replace(self, functions=tuple(functions))

    @property
    def forced(self) -> bool:
        """Whether the answer must have a call."""
        return self.choice == "required" or self.named is not None


def read_tools(given: Sequence[Any] | None, choice: Any = None, parallel: bool | None = None) -> Tools | None:
    """The tools of a request; None if its answer must not call any. Raises ApiError: names the first invalid part.

    Args:
        given: the field `tools`.
        choice: the field `tool_choice`: none, auto, required, the function that must be called, or the functions that
            may be.
        parallel: the field `parallel_tool_calls`.
    """
    if not given:
        if choice not in (None, "none"):
            _fail("tool_choice", f"tool_choice is {shown(choice)}, but there are no tools. Send some as tools.")
        return None
    characters = check_value(list(given), "tools")
    functions, shown_ = [], []
    for index, tool in enumerate(given):
        function = _read_tool(tool, f"tools[{index}]")
        functions.append(function)
        # Other fields of a function are shown too; strict is not for the model.
        described = {name: value for name, value in tool["function"].items() if name != "strict" and value is not None}
        shown_.append({"type": "function", "function": described})
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        _fail("tools", f"tools holds two functions named {shown(twice)}; a call could not tell them apart.")
    allowed = None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _read_allowed(choice.get("allowed_tools"), names)
    kind, named = _read_choice(choice, names)
    if kind == "none":
        return None
    return Tools(
        functions=tuple(functions),
        shown=shown_,
        choice=kind,
        named=named,
        allowed=allowed,
        parallel=parallel is not False,
        characters=characters,
    )


def _read_tool(tool: Any, where: str) -> Function:
    if not isinstance(tool, dict):
        _fail(where, f'{where} must be an object such as {{"type": "function", "function": ...}}, got {shown(tool)}.')
    kind = tool.get("type")
    if kind != "function":
        message = f"{where}.type is {shown(kind)}, which is not supported; only 'function' is."
        _fail(f"{where}.type", message, code="unsupported_parameter")
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, dict):
        _fail(where, f"{where} must be an object with name, description and parameters, got {shown(function)}.")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = f"1 to {MAX_FUNCTION_NAME} of the characters a-z A-Z 0-9 _ . -"
        _fail(f"{where}.name", f"{where}.name must be {allowed}, got {shown(name)}.")
    _check_type(function, "description", str, "a string", where)
    _check_type(function, "parameters", dict, "a JSON schema, which is an object", where)
    _check_type(function, "strict", bool, "true or false", where)
    parameters, dropped = possible(function.get("parameters"))
    return Function(name=name, parameters=parameters, strict=bool(function.get("strict")), dropped=dropped)


def _check_type(function: Mapping[str, Any], name: str, kind: type, wanted: str, where: str) -> None:
    value = function.get(name)
    if value is not None and not isinstance(value, kind):
        _fail(f"{where}.{name}", f"{where}.{name} must be {wanted}, got {shown(value)}.")


def _read_allowed(given: Any, names: Sequence[str]) -> tuple[str, frozenset[str]]:
    where = "tool_choice.allowed_tools"
    if not isinstance(given, dict) or given.get("mode") not in ("auto", "required"):
        _fail(where, f"{where} must be an object with mode (auto or required) and tools, got {shown(given)}.")
    if not isinstance(given.get("tools"), list) or not given["tools"]:
        _fail(f"{where}.tools", f"{where}.tools must be a non-empty list, got {shown(given.get('tools'))}.")
    return given["mode"], frozenset(_read_choice(tool, names)[1] or "" for tool in given["tools"])


def _read_choice(choice: Any, names: Sequence[str]) -> tuple[str, str | None]:
    if choice is None or choice in ("none", "auto", "required"):
        return choice or "auto", None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(choice.get("function"), dict):
        wanted = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        _fail("tool_choice", f"tool_choice must be {wanted}, got {shown(choice)}.")
    name = choice["function"].get("name")
    if name not in names:
        _fail("tool_choice", f"tool_choice names the function {shown(name)}, which is not among the tools.")
    return "auto", name


def _fail(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    raise ApiError(400, message, param=param, code=code)
