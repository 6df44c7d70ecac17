"""The form of arguments in formats that write strings as plain text and other values as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MAX_DEPTH = 32  # maximum nesting of schemas and references
_SHAPES = {"properties", "items", "prefixItems"}  # keywords of objects and arrays, whose schemas need not name the type


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentForm:
    """The allowed form of a value: any text, one of several texts, or JSON that matches a schema. `json`: the schemas,
    one of which must match; the keys are their identities."""

    any_text: bool = False
    texts: Mapping[str, None] = field(default_factory=dict)
    json: Mapping[int, Any] = field(default_factory=dict)


_ANY = ArgumentForm(any_text=True)


def typed(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """A schema of arguments for a reader that follows no references: only the types of each argument."""
    named = (schema or {}).get("properties")
    if schema is None or not isinstance(named, dict):
        return {}
    values = ArgumentValues(schema)
    types = {name: list(dict.fromkeys(values.types(value))) for name, value in named.items()}
    return {"properties": {name: {"type": kinds} for name, kinds in types.items() if kinds}}


class ArgumentValues:
    """The values of one function's arguments. `schema`: the schema of all arguments, in which references are
    resolved."""

    def __init__(self, schema: Mapping[str, Any]):
        self._schema = schema
        self._known: dict[str, ArgumentForm] = {}

    def form(self, schema: Any) -> ArgumentForm:
        """The form of a value that matches a schema. If the schema allows a string, the whole text is read as a
        string."""
        form = self._form(schema, 0)
        return form if form.any_text or form.texts else _json(schema)

    def types(self, schema: Any, depth: int = 0) -> list[str]:
        """The types that a schema allows, if it names them."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return []
        if isinstance(schema.get("$ref"), str):
            return self.types(self.target(schema["$ref"]), depth + 1)
        kinds = schema.get("type")
        types = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
        for name in ("anyOf", "oneOf"):
            for one in schema[name] if isinstance(schema.get(name), list) else ():
                types += self.types(one, depth + 1)
        if not types and isinstance(schema.get("allOf"), list):
            types = next(filter(None, (self.types(one, depth + 1) for one in schema["allOf"])), [])
        return [*types, "null"] if schema.get("nullable") else types

    def _form(self, schema: Any, depth: int) -> ArgumentForm:
        if not isinstance(schema, dict):
            return _ANY if schema is True else ArgumentForm() if schema is False else _json(schema)
        if isinstance(schema.get("$ref"), str):
            return self._referred(schema, depth)
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if "string" not in kinds and ("type" in schema or _SHAPES & schema.keys()):
            return _json(schema)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return _listed(values, [kind for kind in kinds if kind not in (None, "string")])
        if "type" in schema:
            return _ANY
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                return _united([self._form(one, depth + 1) for one in schema[name]])
        if isinstance(schema.get("allOf"), list):
            forms = (self._form(one, depth + 1) for one in schema["allOf"])
            return next((form for form in forms if not form.any_text), _ANY)
        return _ANY

    def _referred(self, schema: dict[str, Any], depth: int) -> ArgumentForm:
        reference = schema["$ref"]
        if reference not in self._known:
            target = self.target(reference) if depth < _MAX_DEPTH else None
            self._known[reference] = ArgumentForm()  # while it is being resolved: a schema may refer to itself
            found = ArgumentForm() if target is None else self._form(target, depth + 1)
            if not found.any_text and not found.texts:
                found = _json(schema)
            self._known[reference] = found
        return self._known[reference]

    def target(self, reference: str) -> Any:
        """The schema that a reference names; None if it does not exist."""
        start, *names = reference.split("/")
        found: Any = self._schema if start == "#" else None
        for name in names:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found


def _json(schema: Any) -> ArgumentForm:
    return ArgumentForm(json={id(schema): schema})


def _listed(values: list[Any], others: list[Any]) -> ArgumentForm:
    """The form of one of several values. `others`: the other allowed types besides text; if none is named, everything
    is read as text."""
    texts = dict.fromkeys(value for value in values if isinstance(value, str))
    rest = [value for value in values if not isinstance(value, str)]
    if not rest or (texts and not others):
        return ArgumentForm(texts=texts)
    schema = {"type": others, "enum": rest} if others else {"enum": rest}
    return ArgumentForm(texts=texts, json={id(schema): schema})


def _united(forms: Sequence[ArgumentForm]) -> ArgumentForm:
    if any(form.any_text for form in forms):
        return _ANY
    texts: dict[str, None] = {}
    json: dict[int, Any] = {}
    for form in forms:
        texts |= form.texts
        json |= form.json
    return ArgumentForm(texts=texts, json=json)
