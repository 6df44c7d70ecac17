"""An OpenAPI document as a page of Markdown: what a reader of the documentation sees without asking any server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

Node = dict[str, Any]

HEAD = """# HTTP API: every endpoint

This page is written from the OpenAPI document of the server, which it also serves at `/openapi.json`, and as a page to
try requests on at `/docs`. [The HTTP API](api.md) explains what belongs together.
"""


def render(document: Node) -> str:
    """The page.

    Args:
        document: OpenAPI 3.1, as FastAPI writes it.
    """
    schemas: Node = document.get("components", {}).get("schemas", {})
    operations = "".join(
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    )
    shapes = "".join(f"\n### {name}\n\n{_shape(schemas[name])}" for name in sorted(schemas))
    return f"{HEAD}\n## Endpoints\n{operations}\n## Shapes\n{shapes}"


def _operation(method: str, path: str, operation: Node) -> str:
    parts = [f"\n### {method.upper()} {path}\n", f"**{operation['summary']}.** {operation.get('description', '')}\n"]
    if rows := [
        (f"`{one['name']}`", one["in"], _kind(one.get("schema", {})), _text(one))
        for one in operation.get("parameters", [])
    ]:
        parts.append(_table(("parameter", "in", "type", "meaning"), rows))
    content = operation.get("requestBody", {}).get("content", {})
    for media, body in content.items():
        parts.append(f"Body, `{media}`: {_kind(body.get('schema', {}))}\n")
        for name, example in body.get("examples", {}).items():
            shown = json.dumps(example["value"], indent=2, ensure_ascii=False)
            parts.append(f"{example.get('summary', name)}:\n\n```json\n{shown}\n```\n")
    answers = [(status, _answer(answer), _text(answer)) for status, answer in operation.get("responses", {}).items()]
    parts.append(_table(("status", "answer", "meaning"), answers))
    return "\n".join(parts)


def _answer(answer: Node) -> str:
    kinds = (
        (media, _kind(found.get("schema", {})) if "schema" in found else "")
        for media, found in answer.get("content", {}).items()
    )
    return "; ".join(f"`{media}` {kind}".strip() for media, kind in kinds)


def _shape(schema: Node) -> str:
    """A schema's description and its fields."""
    needed = set(schema.get("required", ()))
    said = schema.get("description", "")
    rows = [
        (f"`{name}`" + (" (needed)" if name in needed else ""), _kind(field), _default(field), _text(field))
        for name, field in schema.get("properties", {}).items()
    ]
    table = _table(("field", "type", "default", "meaning"), rows) if rows else f"{_kind(schema)}\n"
    return f"{said}\n\n{table}" if said else table


def _kind(schema: Node) -> str:
    """A type in words, with links to shapes; null, which stands for "not given", is left out."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            kinds = [_kind(one) for one in schema[word] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(kind for kind in kinds if kind)) or "null"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    kind = str(schema.get("type", "anything"))
    if kind == "array":
        kind = f"list of {_kind(schema.get('items', {}))}"
    return f"{kind}{_limits(schema)}"


def _limits(schema: Node) -> str:
    words = {
        "minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below",
        "minLength": "characters, at least", "maxLength": "characters, at most",
        "minItems": "items, at least", "maxItems": "items, at most",
    }  # fmt: skip
    found = [f"{said} {schema[name]:g}" for name, said in words.items() if name in schema]
    return f" ({', '.join(found)})" if found else ""


def _default(schema: Node) -> str:
    return f"`{json.dumps(schema['default'])}`" if schema.get("default") is not None else ""


def _text(schema: Node) -> str:
    return str(schema.get("description", ""))


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(_lines(heads, rows)) + "\n"


def _lines(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', '&#124;') for cell in row)} |"
