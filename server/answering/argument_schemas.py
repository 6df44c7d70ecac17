"""Schemas of functions' arguments, as they are enforced in answers."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

Schema = dict[str, Any]

# Keywords whose values contain schemas. Schemas under allOf stay open, because they apply together.
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
    """A schema whose objects have only the named properties. If the schema leaves that open, a small model under
    enforcement invents properties. Objects without named properties, and objects to which other schemas may add
    properties, stay unchanged."""

    def close(one: Schema) -> Schema:
        return {**one, "additionalProperties": False} if "properties" in one and not _OPENING & one.keys() else one

    return _changed(schema, close)


def possible(schema: Any) -> tuple[Any, bool]:
    """The schema without enums in which no value has the required type, and whether there were
    any: such an enum would allow nothing."""
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
    """A schema in which every subschema has been changed, from the inside out."""
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
