"""Parts of JSON schemas that llguidance does not cover: the location of a problem in a schema, exclusion by `oneOf`,
formats for which it allows slightly too much, and numbers that it rounds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, TypeGuard

# Keywords whose value is a schema, a list of schemas, or schemas by name.
_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_MOST_STEPS = 20_000  # comparisons of schemas, after which the result is unknown


def subschemas(schema: Any, path: str = "#") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A schema and all schemas within it, each with its path, the outer ones first. The depth is bounded by
    `engine.interface.structured.check_structure`."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for name in _ONE:
        if isinstance(schema.get(name), Mapping):
            yield from subschemas(schema[name], f"{path}/{name}")
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            for number, item in enumerate(schema[name]):
                yield from subschemas(item, f"{path}/{name}/{number}")
    for name in _NAMED:
        if isinstance(schema.get(name), Mapping):
            for key, item in schema[name].items():
                yield from subschemas(item, f"{path}/{name}/{_escaped(key)}")


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")  # JSON pointers, RFC 6901


_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_WORD, _LABEL = r"[A-Za-z0-9_%+'-]{1,30}", r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,28}[A-Za-z0-9])?"
# Without 30 February, leap seconds, or parts of addresses that are too long: what every validator accepts.
_FORMATS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": rf"^{_WORD}(?:\.{_WORD})?@(?:{_LABEL}\.){{1,4}}[A-Za-z]{{2,20}}$",
    "time": f"^{_TIME}$",
}


def narrow(schema: Any) -> None:
    """Rewrite keywords that llguidance would apply too loosely or not at all: formats become patterns that allow
    nothing else, inexact bounds become the nearest exact ones, and exclusive bounds become inclusive.
    """
    items = [item for _, item in subschemas(schema) if isinstance(item, dict)]
    combined = any(map(_combines, items))
    for item in items:
        _narrow_wide_bounds(item)
        _narrow_exclusive_bounds(item, combined)
        _narrow_format(item)


def _narrow_format(item: dict[str, Any]) -> None:
    pattern = _FORMATS.get(str(item.get("format")))
    if pattern is None:
        return
    del item["format"]
    if "pattern" in item:
        item["allOf"] = [*item.get("allOf", ()), {"pattern": pattern}]
    else:
        item["pattern"] = pattern


def _narrow_wide_bounds(item: dict[str, Any]) -> None:
    for sign, name, exclusive in ((1, "maximum", "exclusiveMaximum"), (-1, "minimum", "exclusiveMinimum")):
        found = [keyword for keyword in (name, exclusive) if _is_number(item.get(keyword))]
        wide = [keyword for keyword in found if sign * item[keyword] > MOST_EXACT]
        for keyword in wide:
            del item[keyword]
        if wide == found != []:
            item[name] = sign * MOST_EXACT


def _narrow_exclusive_bounds(item: dict[str, Any], combined: bool) -> None:
    """llguidance accepts an excluded whole number (0 in 0 < x < 0.5) if no other lies between the bounds. `combined`:
    whether bounds of other schemas may combine with those of this one."""
    if item.get("type") == "integer":
        return
    bounds = {name: item[name] for name in _BOUNDS if _is_number(item.get(name))}
    if any(abs(bound) > MOST_EXACT for bound in bounds.values()):
        return  # the schema is refused
    lowest = max((bounds[name] for name in ("minimum", "exclusiveMinimum") if name in bounds), default=-math.inf)
    highest = min((bounds[name] for name in ("maximum", "exclusiveMaximum") if name in bounds), default=math.inf)
    if not (combined or 0 < highest - lowest < 1):
        return
    if bounds.get("exclusiveMinimum") == lowest == math.floor(lowest):
        del item["exclusiveMinimum"]
        item["minimum"] = lowest + (abs(lowest) * _STEP or _LEAST)
    if bounds.get("exclusiveMaximum") == highest == math.floor(highest):
        del item["exclusiveMaximum"]
        item["maximum"] = highest - (abs(highest) * _STEP or _LEAST)


def _combines(item: Mapping[str, Any]) -> bool:
    """Whether several schemas, in or beside this one, may apply to the same number."""
    several = isinstance(item.get("allOf"), list) and len(item["allOf"]) > 1
    beside = any(name in item for name in ("$ref", "allOf", "anyOf", "oneOf"))
    return several or (beside and any(name in item for name in _BOUNDS))


_BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
MOST_EXACT = 2**53 - 1  # llguidance's bounds, and the integers in its constants, are float64
# From an excluded number to the smallest allowed: llguidance reads the last digits of a float64 wrongly.
_STEP, _LEAST = 1e-13, 1e-50


def rounded_number(schema: Any) -> tuple[str, str, int | float] | None:
    """A keyword whose number llguidance would round, so that it would allow other values than the schema.

    Returns:
        Its name, the path of the schema that has it, and the number; None if there is none.
    """
    for path, item in subschemas(schema):
        for keyword in _BOUNDS:
            bound = item.get(keyword)
            if _is_number(bound) and abs(bound) > MOST_EXACT:
                return keyword, path, bound
        for keyword in ("const", "enum"):
            for number in _numbers(item.get(keyword)):
                if abs(number) > MOST_EXACT:
                    return keyword, path, number
    return None


def _numbers(value: Any) -> Iterator[int | float]:
    if _is_number(value):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


_UNKNOWN = re.compile(r"Unimplemented keys: \[(.*?)\]")
# What a message names, with the keyword that contains it.
_VALUES = (
    (re.compile(r"Unknown format: (.*)"), "format"),
    (re.compile(r"Invalid type: (.*)"), "type"),
    (re.compile(r"Resource '(?:.*/)?(.*?)' is not present"), "$ref"),
    (re.compile(r"Pointer '(.*?)' does not exist"), "$ref"),
    (re.compile(r"regex parse error:\n    (.*)\n"), "pattern"),
)
_KEYWORDS = (
    (re.compile(r"for '(\w+)'"), None),
    (re.compile(r"^(\w+) must be "), None),
    (re.compile(r"Unsatisfiable schema: (\w+) \("), None),
    (re.compile(r"required property '.*' is unsatisfiable"), "required"),
    (re.compile(r"anyOf is empty"), "enum"),
    (re.compile(r"incompatible types"), "allOf"),
)


def place_of(schema: Any, message: str) -> tuple[str, str] | None:
    """The keyword that llguidance's message is about, and the path to the schema that contains it; None if that is not
    known."""
    if (found := _UNKNOWN.search(message)) is not None:
        for keyword in re.findall(r'"(.*?)"', found[1]):
            for path, item in subschemas(schema):
                if keyword in item:
                    return keyword, path
    for pattern, keyword in _VALUES:
        if (found := pattern.search(message)) is not None:
            for path, item in subschemas(schema):
                if found[1] and found[1] in str(item.get(keyword, "")):
                    return keyword, path
    for pattern, named in _KEYWORDS:
        if (found := pattern.search(message)) is not None:
            keyword = named or found[1]
            for path, item in subschemas(schema):
                if keyword in item:
                    return keyword, path
    return None


def overlapping(schema: Any) -> str | None:
    """The path of a `oneOf` in which several schemas may hold at once, as far as is known; None if they all exclude
    each other.

    llguidance treats schemas that it cannot tell apart as `anyOf`, which allows too much.
    """
    exclusion = _Exclusion(schema)
    for path, item in subschemas(schema):
        options = item.get("oneOf")
        if isinstance(options, list) and not all(exclusion.between(a, b) for a, b in combinations(options, 2)):
            return f"{path}/oneOf"
    return None


class _Exclusion:
    """A check that no value is valid for both of two schemas in a document. In doubt, the check fails."""

    def __init__(self, root: Any):
        self._root = root
        self._steps = 0

    def between(self, one: Any, other: Any, depth: int = 0) -> bool:
        self._steps += 1
        if self._steps > _MOST_STEPS or depth > 16:
            return False
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        for parts, rest in ((one, other), (other, one)):
            for name in ("anyOf", "oneOf"):
                options = parts.get(name)
                if isinstance(options, list) and all(self.between(option, rest, depth + 1) for option in options):
                    return True
            if isinstance(parts.get("allOf"), list) and any(self.between(p, rest, depth + 1) for p in parts["allOf"]):
                return True
        if not _types(one) & _types(other):
            return True
        values, others = _values(one), _values(other)
        if values is not None and others is not None and not any(_same(a, b) for a in values for b in others):
            return True
        if _numbers_apart(one, other):
            return True
        return self._objects_apart(one, other, depth)

    def _objects_apart(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """Whether both are objects, and one requires a property for which no value is valid for both."""
        if _types(one) & _types(other) != {"object"}:
            return False
        mine, theirs = one.get("properties"), other.get("properties")
        if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
            return False
        needed = {*_names(one.get("required")), *_names(other.get("required"))}
        for name in needed:
            if name in mine and name in theirs and self.between(mine[name], theirs[name], depth + 1):
                return True
        for closed, known, needs in ((one, mine, other), (other, theirs, one)):
            is_closed = closed.get("additionalProperties") is False and not closed.get("patternProperties")
            if is_closed and any(name not in known for name in _names(needs.get("required"))):
                return True
        return False

    def _resolved(self, schema: Any) -> Any:
        for _ in range(16):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#"):
                return schema
            target: Any = self._root
            for part in reference[1:].split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(target, Mapping) or part not in target:
                    return None
                target = target[part]
            schema = target
        return None


_ALL_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    values = _values(schema)
    if given is None and values is not None:
        return frozenset(kind for value in values for kind in _types_of(value))
    named = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else _ALL_TYPES
    return frozenset(named | ({"integer"} if "number" in named else set()))


def _types_of(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int | float):
        return frozenset({"integer", "number"})
    return frozenset({"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"})


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _numbers_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both are numbers whose ranges do not overlap."""
    if not _types(one) & _types(other) <= {"integer", "number"}:
        return False
    for low, high in ((one, other), (other, one)):
        for least, most, equal in (
            ("minimum", "maximum", False),
            ("exclusiveMinimum", "maximum", True),
            ("minimum", "exclusiveMaximum", True),
            ("exclusiveMinimum", "exclusiveMaximum", True),
        ):
            a, b = low.get(least), high.get(most)
            numbers = not isinstance(a, bool) and not isinstance(b, bool)
            if numbers and isinstance(a, int | float) and isinstance(b, int | float) and (a > b or (equal and a == b)):
                return True
    return False


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
