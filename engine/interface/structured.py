"""The format of an answer, as a request sets it: a JSON schema, a regular expression, a choice, a grammar.

The names are vLLM's (`StructuredOutputsParams`). Only sizes are checked here. `engine.text.grammars` compiles the texts
and finds other errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import InvalidRequestError
from engine.interface.values import brief

KINDS = ("choice", "grammar", "json", "json_object", "regex", "structural_tag")
MAX_GRAMMAR_BYTES = 128 * 1024  # bytes of a schema as JSON, or of other texts
MAX_SCHEMA_DEPTH = 64  # maximum nesting of objects and lists
MAX_SCHEMA_PROPERTIES = 1000  # maximum properties of all objects of a schema together
MAX_CHOICES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The format of an answer; exactly one of the first six fields is set.

    Attributes:
        choice: the answer is one of these texts.
        grammar: the answer follows this grammar, in llguidance's form of Lark or in llama.cpp's GBNF.
        json: the answer is JSON that matches this schema: an object, a boolean, or either as text.
        json_object: the answer is any JSON object.
        regex: the whole answer matches this regular expression (Rust's syntax, without look-around and
            back-references).
        structural_tag: the answer is free text in which each trigger begins one of the tags, whose content is JSON of
            the tag's
            schema: {"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}, or that as text.
        disable_any_whitespace: JSON has no white space between its parts.
        whitespace_pattern: regular expression for the white space between two parts of JSON.
        around: text that may surround or replace the formatted text (reasoning, function calls): a grammar in the same
            form of Lark, in which `@answer` represents the formatted text.
    """

    choice: Sequence[str] | None = None
    grammar: str | None = None
    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    around: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            _refuse(
                f"structured_outputs must hold exactly one of {', '.join(KINDS)}, got {', '.join(given) or 'none'}."
            )
        for name in ("around", "grammar", "regex", "whitespace_pattern"):
            text = getattr(self, name)
            if text is not None:
                if not isinstance(text, str):
                    _refuse(f"{name} must be a string, got {brief(text)}.", name)
                check_size(name, text)
        for name in ("disable_any_whitespace", "json_object"):
            if not isinstance(getattr(self, name), bool | None):
                _refuse(f"{name} must be true or false, got {brief(getattr(self, name))}.", name)
        if self.choice is not None:
            self._check_choice(self.choice)
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _as_text(name, getattr(self, name)))

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def size(self) -> int:
        """The number of characters."""
        return sum(map(len, self.choice)) if self.choice is not None else len(str(getattr(self, self.kind)))

    def _check_choice(self, choice: Any) -> None:
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
            _refuse(f"choice must be a list of at least one string, got {brief(choice)}.", "choice")
        if len(choice) > MAX_CHOICES:
            _refuse(f"choice may have at most {MAX_CHOICES} strings, got {len(choice)}.", "choice")
        for text in choice:
            if not isinstance(text, str):
                _refuse(f"choice must hold strings, got {brief(text)}.", "choice")
        if sum(map(len, choice)) > MAX_GRAMMAR_BYTES:
            _refuse(f"choice may have at most {MAX_GRAMMAR_BYTES} bytes in all, got more.", "choice")
        check_size("choice", "".join(choice))
        object.__setattr__(self, "choice", tuple(choice))


def _refuse(message: str, name: str | None = None) -> None:
    param = "structured_outputs" if name is None else f"structured_outputs.{name}"
    raise InvalidRequestError(message, param=param, code="invalid_value")


def check_size(name: str, text: str) -> None:
    """Refuse a text with more bytes than a grammar may have."""
    size = len(text)
    try:
        if size <= MAX_GRAMMAR_BYTES:
            size = len(text.encode())
    except UnicodeEncodeError:
        _refuse(f"{name} is not valid Unicode: it holds an unpaired surrogate.", name)
    if size > MAX_GRAMMAR_BYTES:
        _refuse(f"{name} may have at most {MAX_GRAMMAR_BYTES} bytes, got {size}.", name)


def _as_text(name: str, value: Any) -> str:
    """JSON as text, with keys in their order."""
    if isinstance(value, str):
        check_size(name, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            _refuse(f"{name} is a string that is not JSON: {error}.", name)
    if not isinstance(value, Mapping) and not (name == "json" and isinstance(value, bool)):
        what = "an object or a boolean" if name == "json" else "an object"
        _refuse(f"{name} must be {what}, or the same as a string, got {brief(value)}.", name)
    check_structure(name, value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        _refuse(f"{name} is not JSON: {error}.", name)
    check_size(name, text)
    return text


def check_structure(name: str, value: Any) -> None:
    """Refuse a schema that is too large, is nested too deeply, or has too many properties. It does not recurse, and
    examines no more than a schema may have."""
    level: list[Any] = [] if isinstance(value, bool) else [value]
    depth = properties = size = 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH and not all(isinstance(item, str) for item in level):
            _refuse(f"{name} may be nested at most {MAX_SCHEMA_DEPTH} levels deep, got more.", name)
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                size += len(item)
                continue
            size += len(item) + 2
            if size > MAX_GRAMMAR_BYTES:
                _refuse(f"{name} may have at most {MAX_GRAMMAR_BYTES} bytes, got more.", name)
            if isinstance(item, Mapping):
                below += item.values()
                named = item.get("properties")
                properties += len(named) if isinstance(named, Mapping) else 0
            else:
                below += item
        if properties > MAX_SCHEMA_PROPERTIES:
            _refuse(f"{name} may have at most {MAX_SCHEMA_PROPERTIES} properties in all, got more.", name)
        level = [item for item in below if isinstance(item, Mapping | list | tuple | str)]
