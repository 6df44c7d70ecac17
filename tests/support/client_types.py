"""Answers against the types of OpenAI's and Anthropic's clients: fields that are missing, unknown or of another type.

The clients' own parsing is lenient. It keeps unknown fields and accepts any type.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from typing_extensions import TypeAliasType


def problems(value: Any, kind: Any, path: str = "", *, every: bool = False) -> Iterator[tuple[str, str]]:
    """The differences from a type: pairs of "missing", "unknown" or "wrong", and a path without indices.

    Args:
        value: JSON's objects.
        kind: a model of the client, or what a field of one may be.
        every: fields that may be null must be there, too.
    """
    origin = get_origin(kind)
    if origin is Annotated or isinstance(kind, TypeAliasType):
        yield from problems(value, kind.__value__ if origin is None else get_args(kind)[0], path, every=every)
    elif origin in (Union, UnionType):
        yield from _of_union(value, get_args(kind), path, every)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from _of_model(value, kind, path, every)
    elif origin in (list, dict):
        if not isinstance(value, origin):
            yield "wrong", path
            return
        for one in value.values() if origin is dict else value:
            yield from problems(one, get_args(kind)[-1], f"{path}[]", every=every)
    elif not _fits(value, kind):
        yield "wrong", path


def _of_union(value: Any, kinds: tuple[Any, ...], path: str, every: bool) -> Iterator[tuple[str, str]]:
    if value is None and NoneType in kinds:
        return
    found = [list(problems(value, kind, path, every=every)) for kind in kinds if kind is not NoneType]
    # Of objects the one whose type fits, or else the one with the fewest differences.
    yield from min(found, key=lambda some: (("wrong", f"{path}.type") in some, len(some)))


def _of_model(value: Any, model: type[BaseModel], path: str, every: bool) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        yield "wrong", path
        return
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for name in value.keys() - fields.keys():
        yield "unknown", f"{path}.{name}"
    for name, field in fields.items():
        if name in value:
            yield from problems(value[name], field.annotation, f"{path}.{name}", every=every)
        elif every or field.is_required():
            yield "missing", f"{path}.{name}"


def _fits(value: Any, kind: Any) -> bool:
    if kind in (Any, object):
        return True
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    try:
        TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    return True
