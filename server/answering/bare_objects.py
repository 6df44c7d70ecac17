"""Arguments in Gemma 4's form: JSON whose keys have no quotes and whose strings stand between special marks.

The rules follow a schema; llguidance itself can only turn a schema into JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from server.answering.argument_values import ArgumentValues

_KEY = re.compile(r"\w+", re.ASCII)  # the call parser knows no other keys
_PLAIN = {"string": "string", "integer": "INTEGER", "number": "NUMBER", "boolean": "BOOLEAN", "null": '"null"'}
_MOST_COUNTED = 64  # maximum array items whose number is enforced


def shared_rules(mark: str) -> list[str]:
    """The rules that all arguments share, besides `string_end`: any text, and the mark after it. `mark`: the mark
    around strings, as the grammar writes it."""
    return [
        f"string: {mark} string_end",
        'any: string | NUMBER | BOOLEAN | "null" | any_object | any_array',
        'any_object: "{" (any_pair ("," any_pair)*)? "}"',
        'any_pair: KEY ":" any',
        'any_array: "[" (any ("," any)*)? "]"',
        "KEY: /[a-zA-Z0-9_]+/",
        "INTEGER: /-?(0|[1-9][0-9]{0,17})/",
        r"NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/",
        "BOOLEAN: /true|false/",
    ]


class BareObjects:
    """The rules of one function's arguments."""

    def __init__(self, name: str, schema: Mapping[str, Any], mark: str):
        self._name = name  # the name of the first rule; the names of the others begin with it
        self._mark = mark  # the mark around strings, as the grammar writes it
        self._values = ArgumentValues(schema)
        self._referred: dict[str, str] = {}  # rules by reference, because a schema may refer to itself
        self._rules: list[str] = []
        self._count = 0
        self._schema = schema

    def rules(self) -> list[str]:
        """All rules. Raises ValueError if the schema cannot be written in this form."""
        return [f"{self._name}: {self._object(self._schema)}", *self._rules]

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            if schema is False:
                raise ValueError("the schema allows no value for an argument, so the call cannot be enforced")
            return "any"
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema["$ref"])
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return f"({' | '.join(map(self._constant, values))})"
        for name in ("anyOf", "oneOf", "allOf"):
            choices = schema.get(name)
            if isinstance(choices, list) and choices and "type" not in schema:
                return f"({' | '.join(map(self._value, choices if name != 'allOf' else choices[:1]))})"
        kinds = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else None)
        if kinds is None:
            return "any"
        return (
            f"({' | '.join(self._of_kind(kind, schema) for kind in (kinds if isinstance(kinds, list) else [kinds]))})"
        )

    def _of_kind(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind in _PLAIN:
            return _PLAIN[kind]
        if kind not in ("object", "array"):
            raise ValueError(f"a call with an argument of the type {json.dumps(kind)} cannot be enforced")
        return self._rule(self._object(schema) if kind == "object" else self._array(schema))

    def _rule(self, body: str) -> str:
        self._count += 1
        self._rules.append(f"{self._name}_{self._count}: {body}")
        return f"{self._name}_{self._count}"

    def _reference(self, reference: str) -> str:
        if reference not in self._referred:
            target = self._values.target(reference)
            if target is None:
                raise ValueError(
                    f"the schema refers to {json.dumps(reference)}, which does not exist, so the call cannot be "
                    "enforced"
                )
            self._count += 1
            name = self._referred[reference] = f"{self._name}_{self._count}"
            self._rules.append(f"{name}: {self._value(target)}")
        return self._referred[reference]

    def _object(self, schema: Mapping[str, Any]) -> str:
        """The members in the order of the schema; optional ones may be missing."""
        named = schema.get("properties")
        if not isinstance(named, dict):
            return "any_object"
        required = schema.get("required")
        more = schema.get("additionalProperties", True) is not False
        # The expression after a member, and the expression if no member came before.
        behind = self._rule('("," any_pair)*') if more else ""
        first = self._rule('(any_pair ("," any_pair)*)?') if more else ""
        for key, value in reversed(named.items()):
            if value is False:  # it may have no value
                continue
            if not _KEY.fullmatch(key):
                raise ValueError(f"a call with an argument named {json.dumps(key)} cannot be enforced")
            pair = self._rule(f"{_text(f'{key}:')} {self._value(value)}")
            member = f"{pair} {behind}".strip()
            if isinstance(required, list) and key in required:
                behind, first = self._rule(f'"," {member}'), self._rule(member)
            else:
                behind = self._rule(f'"," {member} | {behind}' if behind else f'("," {member})?')
                first = self._rule(f"{member} | {first}" if first else f"({member})?")
        return f'"{{" {first} "}}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        item = self._value(schema.get("items", True))
        least, most = (_counted(schema.get(name)) for name in ("minItems", "maxItems"))
        if most == 0:
            return '"[" "]"'
        bounds = f"{{{max((least or 0) - 1, 0)},{'' if most is None else most - 1}}}"
        items = f'{item} ("," {item}){bounds}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return " ".join(filter(None, [self._mark, _text(value) if value else "", self._mark]))
        if isinstance(value, list):
            return " ".join([_text("["), *_joined(map(self._constant, value)), _text("]")])
        if isinstance(value, dict):
            members = (f"{_text(f'{key}:')} {self._constant(one)}" for key, one in value.items())
            return " ".join([_text("{"), *_joined(members), _text("}")])
        return _text(json.dumps(value))


def _joined(parts: Any) -> list[str]:
    made: list[str] = []
    for part in parts:
        made += [_text(","), part] if made else [part]
    return made


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _counted(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_COUNTED else None
