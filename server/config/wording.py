"""Texts about settings: their help, their values, and suggestions for names."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


def field_docs(cls: type) -> dict[str, str]:
    """The descriptions in a class's `Attributes:` section, by field name."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:")[2]  # Python 3.13 removes the indentation
    docs: dict[str, str] = {}
    for names, sentence in re.findall(r"^ {4}(\w[\w, ]*): (.+(?:\n {8}.+)*)", text, re.MULTILINE):
        for name in names.split(", "):
            docs[name] = re.sub(r"\s+", " ", sentence)
    return docs


_NEAR = 0.7  # minimum similarity for a suggestion
_SHORTENED = 0.95


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean NEAR?" if a known name is similar, else nothing.

    The suggestion has the same words and perhaps more (max-length: max-model-len). Otherwise it is the most similar
    name, or begins with the most similar text (tempp: temperature).
    """
    plain = {re.sub(r"^(octavo_|-+)", "", other.lower().replace("-", "_")).strip("_"): other for other in known}
    name = re.sub(r"^(octavo_|-+)", "", name.lower().replace("-", "_")).strip("_")
    pool = [other for other in plain if _has_words(other, name)] or list(plain)
    near = max(pool, key=lambda other: _likeness(name, other), default="")
    is_near = near and (len(pool) < len(plain) or _likeness(name, near) >= _NEAR)
    return f"; did you mean {plain[near]}?" if is_near else ""


def _likeness(name: str, other: str) -> float:
    """Similarity from 0 to 1. A shortened name counts slightly less than a whole one."""
    whole = difflib.SequenceMatcher(None, name, other).ratio()
    begun = difflib.SequenceMatcher(None, name, other[: len(name)]).ratio() if name[:1] == other[:1] else 0.0
    return max(whole, _SHORTENED * begun)


def _has_words(name: str, wanted: str) -> bool:
    """Whether every wanted word begins a word of the name, or the other way round."""
    words = name.split("_")
    return all(any(word.startswith(part) or part.startswith(word) for word in words) for part in wanted.split("_"))


def is_switch(field: FieldInfo) -> bool:
    """Whether the setting is on or off, or undecided until later."""
    return field.annotation is bool or set(get_args(field.annotation)) == {bool, type(None)}


def _kinds(field: FieldInfo) -> list[Any]:
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not type(None)]
    return [choice for kind in kinds for choice in (get_args(kind) if get_origin(kind) is Literal else (kind,))]


def choices(field: FieldInfo) -> list[str]:
    """The allowed names of a setting, if it allows nothing else."""
    kinds = _kinds(field)
    return kinds if all(isinstance(kind, str) for kind in kinds) else []


def allowed(field: FieldInfo) -> str:
    """The allowed values of a setting, as in "port must be ..."."""
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
