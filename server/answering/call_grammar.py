"""Grammars for answers with function calls, in the form that the model was trained to write. They also cover text
before calls, and answers in another format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine.text.writing import Pair, Writing
from server.answering.argument_schemas import closed
from server.answering.argument_values import ArgumentValues
from server.answering.bare_objects import BareObjects, shared_rules
from server.answering.formats import CallFormat
from server.answering.parsing import Parsing
from server.answering.tools import Function, Tools

# At most one space between two parts of the arguments, because a model under enforcement may otherwise write white
# space for ever.
_JSON_OPTIONS = {"coerce_one_of": True, "lenient": False, "whitespace_pattern": r"\x20"}
_MAX_RULES = 1_000_000  # maximum characters of the rules for arguments that are not one JSON object
_REFERS = '"$ref"'
_TERMINALS = (
    r"TEXT: /(.|\n)*/",
    r"SPACE: /[ \t\r\n]{0,8}/",
    r"NO_OBJECT: /[^{ \t\r\n](.|\n)*/",  # an answer without a call, if only an object marks a call
)


def call_grammar(parsing: Parsing, special: Mapping[int, str], *, formed: bool = False) -> str | None:
    """The grammar of the answer, in llguidance's form of Lark; None if any answer is allowed.

    If calls are required, the answer contains only calls, and reasoning if the model reasons. If calls are optional,
    the arguments of strict functions follow their schemas. Raises ValueError if the model's format cannot be enforced.

    Args:
        special: the ids of special tokens by their texts; a grammar refers to them by id.
        formed: an answer without calls has its own format, which `@answer` stands for.
    """
    tools, format = parsing.tools, parsing.formats.calls
    quoted = _Quoted(special)
    before, rules = _reasoning(parsing, quoted)
    if tools is None or format is None:
        return "\n".join([f"start: {before} @answer", *rules, *_TERMINALS]) if formed and before else None
    if not (formed or tools.forced or tools.allowed is not None or any(one.strict for one in tools.functions)):
        return None
    if format.writing is None:
        raise ValueError(f"calls in the format of {format.models} ({format.name}) cannot be enforced")
    if tools.forced:
        start = "calls"
    elif formed and (format.writing.first + format.writing.begin).startswith("{"):
        # For JSON, "{" is matched alone, without the text that may follow it in a call.
        rules.append(f"call: %json {_as_object(format.writing, tools)}")
        return "\n".join([f"start: {before} (call | @answer)", *rules, *_TERMINALS])
    elif formed:
        start = "(calls | @answer)"
    else:
        start, more = _free(format, format.writing, quoted)
        rules += more
    several = tools.parallel and tools.named is None  # a named function is called once, as at OpenAI
    rules += _calls(format.writing, tools.callable, quoted, several=several, every=tools.forced)
    return "\n".join([f"start: {before} {start}", *rules, *_TERMINALS])


class _Quoted:
    """Texts in a grammar's notation; special tokens are written by id."""

    def __init__(self, special: Mapping[int, str]):
        self._ids = {text: token for token, text in special.items() if text}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")

    def __call__(self, text: str) -> str:
        parts, at = [], 0
        for found in self._pattern.finditer(text):
            parts += [_literal(text[at : found.start()]), f"<[{self._ids[found.group()]}]>"]
            at = found.end()
        return " ".join(filter(None, [*parts, _literal(text[at:])]))

    def until(self, rule: str, text: str) -> list[str]:
        """A rule for any text up to and including this one. Special tokens match no terminal and end any."""
        found = self._pattern.search(text)
        if found is None:
            return [f"{rule}[lazy]: TEXT {_literal(text)}"]
        if not found.start():
            return [f"{rule}: TEXT {self(text)}"]
        name, lead = f"{rule.upper()}_LEAD", text[: found.start()]
        return [f"{rule}: {name} {self(text[found.start() :])}", f"{name}: TEXT {_literal(lead)}"]

    def holds_token(self, text: str) -> bool:
        """Whether it contains a special token."""
        return self._pattern.search(text) is not None

    def begins_with_token(self, text: str) -> bool:
        """Whether it begins with a special token, which no text contains."""
        return self._pattern.match(text) is not None


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    return _text(text) if text else ""


def _calls(
    writing: Writing, functions: Iterable[Function], quoted: _Quoted, *, several: bool, every: bool
) -> list[str]:
    """The rule `calls` and its parts: `call`, `body` (without its opening), and `more` for the calls after it. `every`:
    enforce the arguments of all functions, not only of strict ones."""
    lines, names, size = [], [], 0
    for index, function in enumerate(functions):
        names.append(f"call_{index}")
        lines.append(f"call_{index}: {_literal(function.name)} {quoted(writing.middle)} arguments_{index}")
        schema = _arguments(function, every=every)
        if writing.pair is not None:
            rules = _pairs(f"arguments_{index}", schema, writing.pair, quoted)
        elif writing.quote is not None:
            rules = iter(BareObjects(f"arguments_{index}", schema, quoted(writing.quote)).rules())
        else:
            rules = iter([f"arguments_{index}: {_json(schema)}"])
        for line in rules:
            lines.append(line)
            size += len(line)
            if size > _MAX_RULES:  # definitions that several arguments refer to are repeated for each
                raise ValueError(f"calls whose schemas have more than {_MAX_RULES} characters cannot be enforced")
    if writing.pair is not None:
        lines += quoted.until("plain", writing.pair.end)
    elif writing.quote is not None:
        lines += [*shared_rules(quoted(writing.quote)), *quoted.until("string_end", writing.quote)]
    others = "" if not several or writing.between is None else f"({quoted(writing.between)} call)*"
    return [
        f"calls: {quoted(writing.first)} call more",
        f"call: {quoted(writing.begin)} body",
        f"body: ({' | '.join(names)}) {quoted(writing.end)}",
        f"more: {others} {quoted(writing.last)}",
        *lines,
    ]


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def _pairs(rule: str, schema: Mapping[str, Any], pair: Pair, quoted: _Quoted) -> Iterator[str]:
    """The rule for arguments that are written one by one, in the order of the schema, and its parts."""
    named = schema.get("properties")
    if not isinstance(named, dict):
        yield f"{rule}: ({quoted(pair.begin)} /[a-zA-Z0-9_.-]+/ {quoted(pair.middle)} plain)*"
        return
    required, values, parts = schema.get("required"), ArgumentValues(schema), []
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for index, (name, value) in enumerate(named.items()):
        if value is False:  # it may have no value
            continue
        part = f"{rule}_{index}"
        parts.append(part if isinstance(required, list) and name in required else f"{part}?")
        head = f"{part}: {quoted(pair.begin)} {_literal(name)}"
        form = values.form(value)
        if form.any_text:
            yield f"{head} {quoted(pair.middle)} plain"
            continue
        texts, schemas = [*map(_text, form.texts)], [*form.json.values()]
        ways = [f"{quoted(pair.middle)} ({' | '.join(texts)})"] if texts else []
        if schemas:
            ways.append(f"{quoted(pair.middle_of_json or pair.middle)} {part}_json")
            one = schemas[0] if len(schemas) == 1 and isinstance(schemas[0], dict) else {"anyOf": schemas}
            yield f"{part}_json: {_json({**shared, **one} if _REFERS in json.dumps(one) else one)}"
        yield f"{head} ({' | '.join(ways)}) {quoted(pair.end)}"
    yield f"{rule}: {' '.join(parts)}"


def _as_object(writing: Writing, tools: Tools) -> str:
    name, arguments = (re.findall(r'"(\w+)"', text)[0] for text in (writing.begin, writing.middle))
    calls = [
        {
            "type": "object",
            "properties": {name: {"const": function.name}, arguments: _arguments(function, every=tools.forced)},
            "required": [name, arguments],
            "additionalProperties": False,
        }
        for function in tools.callable
    ]
    return json.dumps({"anyOf": calls, "x-guidance": _JSON_OPTIONS})


def _arguments(function: Function, *, every: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    if function.parameters is not None and (every or function.strict):
        schema |= closed(function.parameters)
    return schema


def _reasoning(parsing: Parsing, quoted: _Quoted) -> tuple[str, list[str]]:
    reasoning = parsing.formats.reasoning
    if reasoning is None:
        return "", []
    rules = [f"reasoning: SPACE {quoted(reasoning.open)} thought"]
    if quoted.begins_with_token(reasoning.close):
        rules.append(f"thought: TEXT {quoted(reasoning.close)} SPACE")
    else:
        rules += ["thought: thinking SPACE", f"thinking[lazy]: TEXT {quoted(reasoning.close)}"]
    return ("thought", rules[1:]) if parsing.begins_in_reasoning else ("reasoning?", rules)


def _free(format: CallFormat, writing: Writing, quoted: _Quoted) -> tuple[str, list[str]]:
    opening = writing.first + writing.begin
    if opening.startswith("{"):
        return "(calls | NO_OBJECT?)", []
    if quoted.begins_with_token(opening):
        return "TEXT (calls TEXT)*", []
    if quoted.holds_token(opening):
        raise ValueError("calls whose first mark contains a special token can be enforced only if a call is required")
    marks = [*format.drops, *(region["open"] for region in format.regions if "open" in region)]
    mark = next((mark for mark in marks if opening.startswith(mark)), opening.partition("\n")[0])
    rest = quoted(opening.removeprefix(mark))
    return "marked* TEXT", [f"marked: mark {rest} body more", f"mark[lazy]: TEXT {_literal(mark)}"]
