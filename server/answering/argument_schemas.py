"""Schemas of functions' arguments, as answers are held to them."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

Schema = dict[str, Any]

# Keywords that hold schemas. Those under allOf are left alone: others count beside them.
_SCHEMAS = {"items", "prefixItems", "anyOf", "oneOf"}
_NAMED_SCHEMAS = {"properties", "$defs", "definitions"}
_OPENING = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "allOf", "anyOf", "oneOf",
    "$ref", "if", "not", "dependentSchemas",
}  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int, float), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def closed(schema: Any) -> Any:
    """A schema whose objects have the properties that it names, and no others: where it leaves that open, a small model
    that is led invents some. Objects that name none, and such as other schemas may add to, stay as they are."""

    def close(one: Schema) -> Schema:
        return {**one, "additionalProperties": False} if "properties" in one and not _OPENING & one.keys() else one

    return _changed(schema, close)


def possible(schema: Any) -> tuple[Any, bool]:
    """A schema without lists of values of which none has the type that it asks for beside them, and whether it had
    any: nothing could be written by it."""
    found = False

    def drop(one: Schema) -> Schema:
        nonlocal found
        types, values = one.get("type"), one.get("enum")
        wanted = [types] if isinstance(types, str) else types
        if not isinstance(wanted, list) or not isinstance(values, list) or not values:
            return one
        if not all(isinstance(kind, str) and kind in _TYPES for kind in wanted):
            return one
        if any(_is(value, kind) for kind in set(wanted) for value in values):
            return one
        found = True
        return {name: value for name, value in one.items() if name != "enum"}

    return _changed(schema, drop), found


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """A schema in which each one has been changed, the inner ones first."""
    if isinstance(schema, list):
        return [_changed(item, change) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    keys: Set[str] = schema.keys()
    for name in _SCHEMAS & keys:
        made[name] = _changed(schema[name], change)
    for name in _NAMED_SCHEMAS & keys:
        if isinstance(schema[name], dict):
            made[name] = {key: _changed(value, change) for key, value in schema[name].items()}
    return change(made)
