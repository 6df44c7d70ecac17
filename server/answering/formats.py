"""The formats in which model families write calls and reasoning: data files, and the choice of formats for a model.

A file in `call_formats` says which texts of a chat template identify the format (`all` of these, `none` of those), in
which regions of an answer calls are, how they are parsed there, and how an enforced call is written. A file in
`reasoning_formats` does the same for reasoning. Regions have the form of `transformers`' response templates.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine import ConfigError
from engine.text.writing import Pair, Writing

_HERE = Path(__file__).parent
AUTO, NONE, OWN = "auto", "none", "response_template"
CALLS, REASONING = "call_formats", "reasoning_formats"  # folders
SETTINGS = {CALLS: "tool_call_parser", REASONING: "reasoning_parser"}
_MARKS = ("open", "open_pattern", "close", "close_pattern")
_PLAIN = ({"type": "function", "function": "{content}"}, {"function": "{content}"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A format for calls."""

    name: str
    models: str  # some models that use it
    # where calls are, in the fields of a response template: open or open_pattern, close or close_pattern (default: the
    # end); `shown` is the pattern as plain text
    regions: Sequence[Mapping[str, Any]]
    drops: Sequence[str] = ()  # marks around several calls; they are not shown
    # for a region with a name followed by JSON arguments: the pattern before the arguments, with the group `name`. None
    # for objects with a name and arguments, or a list of such objects.
    head: str | None = None
    # for a region that is parsed whole at its end: the other keys of the response template's field
    field: Mapping[str, Any] | None = None
    known_names_only: bool = False  # a call of an unknown function is text; for formats without marks
    writing: Writing | None = None  # how an enforced call is written; None if calls cannot be enforced


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """A format for reasoning: the texts before and after it."""

    name: str
    models: str
    open: str
    close: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """The formats for parsing one model's answers. If both are None, answers are plain text. `prompted`: the templates
    do not support tools, so a system message describes the tools and the call format."""

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    prompted: bool = False


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    also: Sequence[str]
    all: Sequence[str]
    none: Sequence[str]
    said: Mapping[str, Any] = field(repr=False)

    def suits(self, template: str) -> bool:
        return all(text in template for text in self.all) and not any(text in template for text in self.none)


@functools.cache
def _files(folder: str) -> tuple[_File, ...]:
    files = []
    for path in sorted((_HERE / folder).glob("*.json")):
        said = json.loads(path.read_text(encoding="utf-8"))
        files.append(_File(path.stem, said.get("also", ()), said["all"], said["none"], said))
    return tuple(files)


def check_name(folder: str, name: str) -> None:
    """Refuse an unknown format name. Raises ConfigError: lists the known names."""
    files = _files(folder)
    known = [AUTO, NONE, *sorted(name for file in files for name in (file.name, *file.also))]
    if name not in known:
        raise ConfigError(f"{SETTINGS[folder]} must be one of {', '.join(known)}, got {name!r}.")


def _find(folder: str, wanted: str, template: str) -> _File | None:
    check_name(folder, wanted)
    for file in () if wanted == NONE else _files(folder):
        if file.suits(template) if wanted == AUTO else wanted in (file.name, *file.also):
            return file
    return None


def choose_formats(
    templates: str, calls: str = AUTO, reasoning: str = AUTO, response_template: Mapping[str, Any] | None = None
) -> Formats:
    """Choose the formats for parsing a model's answers. Raises ConfigError if there is no format of that name; lists
    the known names.

    Args:
        templates: all chat templates of the model together; "" if it has none.
        response_template: the model's own, which takes precedence over the files with auto.
    """
    call_file = _find(CALLS, calls, templates)
    reasoning_file = _find(REASONING, reasoning, templates)
    found = Formats(
        calls=None if call_file is None else _call_format(call_file),
        reasoning=None
        if reasoning_file is None
        else ReasoningFormat(
            name=reasoning_file.name,
            models=reasoning_file.said["models"],
            open=reasoning_file.said["open"],
            close=reasoning_file.said["close"],
        ),
    )
    own = Formats() if response_template is None else _own_formats(response_template)
    return Formats(
        calls=own.calls if calls == AUTO and own.calls is not None else found.calls,
        reasoning=own.reasoning if reasoning == AUTO and own.reasoning is not None else found.reasoning,
    )


def reading_formats(
    templates: str, calls: str, reasoning: str, tool_prompt: str, response_template: Mapping[str, Any] | None = None
) -> Formats:
    """The formats for parsing a model's answers. The arguments are those of `choose_formats`, and the setting
    `tool_prompt`."""
    formats = choose_formats(templates, calls, reasoning, response_template)
    asks = tool_prompt == AUTO and calls != NONE and bool(templates) and "tools" not in templates
    return prompted(formats) if asks else formats


def prompted(formats: Formats) -> Formats:
    """The formats of a model whose templates do not support tools. The prompt asks it to write calls in Hermes' format,
    which most models have seen, unless it has a format of its own that a prompt can describe."""
    calls = formats.calls
    if calls is None or calls.writing is None or not calls.writing.as_json:
        calls = _call_format(next(file for file in _files(CALLS) if file.name == "hermes"))
    return replace(formats, calls=calls, prompted=True)


def _own_formats(template: Mapping[str, Any]) -> Formats:
    """The formats that a checkpoint states. Reasoning between patterns is left to the files."""
    fields = template.get("fields")
    fields = fields if isinstance(fields, Mapping) else {}
    calls, reasoning = fields.get("tool_calls"), None
    for name in ("reasoning_content", "reasoning", "thinking"):
        said = fields.get(name)
        if isinstance(said, Mapping) and isinstance(said.get("open"), str) and isinstance(said.get("close"), str):
            reasoning = ReasoningFormat(name=OWN, models="", open=said["open"], close=said["close"])
            break
    if not isinstance(calls, Mapping):
        return Formats(reasoning=reasoning)
    region = {name: calls[name] for name in _MARKS if name in calls}
    others = {name: value for name, value in calls.items() if name not in _MARKS}
    # The form that can be parsed while it is written.
    plain = others.get("content") == "json" and others.get("transform") in _PLAIN and not others.get("content_args")
    return Formats(
        calls=CallFormat(name=OWN, models="", regions=[region], field=None if plain else others), reasoning=reasoning
    )


def _call_format(file: _File) -> CallFormat:
    said, reads = file.said, file.said["reads"]
    as_data = {} if isinstance(reads, str) else dict(reads)
    head = as_data.pop("head", None)
    return CallFormat(
        name=file.name,
        models=said["models"],
        regions=said["regions"],
        drops=said.get("drops", ()),
        head=head,
        field=as_data or None,
        known_names_only=bool(said.get("known_names_only")),
        writing=None if said["writes"] is None else _writing(said["writes"]),
    )


def _writing(said: Mapping[str, Any]) -> Writing:
    pair = said.get("pair")
    return Writing(**{**said, "pair": None if pair is None else Pair(**pair)})
