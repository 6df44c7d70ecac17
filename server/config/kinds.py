"""What a setting takes, in words, from its type."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo


def is_switch(field: FieldInfo) -> bool:
    """The setting is on or off, or neither until something else decides."""
    return field.annotation is bool or set(get_args(field.annotation)) == {bool, type(None)}


def _kinds(field: FieldInfo) -> list[Any]:
    """The types of a setting, and of a Literal its values."""
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    return [choice for kind in kinds for choice in (get_args(kind) if get_origin(kind) is Literal else (kind,))]


def choices(field: FieldInfo) -> list[str]:
    """The names that a setting takes, if it takes no others."""
    kinds = _kinds(field)
    return kinds if all(isinstance(kind, str) for kind in kinds) else []


def allowed(field: FieldInfo) -> str:
    """What a setting takes, as in "port must be ..."."""
    if get_origin(field.annotation) is tuple:
        return "a text or a list of texts"
    if names := choices(field):
        return f"one of {', '.join(names)}"
    kinds = _kinds(field)
    if bool in kinds:
        return "true or false"
    if {int, str} <= set(kinds):
        return "a size such as 4GiB, 512MiB or a number of bytes"
    if str in kinds:
        nonempty = any(hasattr(item, "min_length") for item in field.metadata)
        return "a text that is not empty" if nonempty else "a text"
    text = "an integer" if int in kinds else "a number"
    bounds = {key: getattr(item, key) for item in field.metadata for key in ("ge", "gt", "le") if hasattr(item, key)}
    if "le" in bounds:
        return f"{text} from {bounds['ge']} to {bounds['le']}"
    if "ge" in bounds:
        return f"{text} of at least {bounds['ge']}"
    return f"{text} above {bounds['gt']}" if "gt" in bounds else text
