"""Separates an answer's text into text, reasoning and function calls while it is written.

`transformers`' ResponseParser finds the regions. This module parses their content as it arrives, because ResponseParser
reports a call only when it is complete, and fails on an incomplete one. The result does not depend on how the text is
cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import ReasoningBudget
from server.answering.argument_values import typed
from server.answering.calls import NamedCalls, ObjectCalls, Region, ToolCalls
from server.answering.formats import CallFormat, Formats, ReasoningFormat
from server.answering.parts import CallPart, Part, Reasoning, TextPart
from server.answering.tools import Tools

_CALLS = "calls_"  # prefix of the names of call regions, followed by a number
_SPACE = " \t\r\n"
# Text fed after the end of the answer: no mark contains it, so it resolves every possible beginning of a mark.
_END = "\0"
# Closing words of reasoning that reached its limit.
_LAST_WORDS = "\n\nThat is enough thinking; I answer now.\n"
_ANYWHERE = {"start_anchor_pattern": r"\A"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsing:
    """The settings for parsing the answers to one request."""

    formats: Formats  # the model's formats, as far as they are used
    template: Any  # the regions, compiled
    tools: Tools | None  # the functions that may be called; None if calls are text
    shown_special: frozenset[int]  # special tokens whose text is needed to parse the answer
    begins_in_reasoning: bool  # whether the prompt has opened reasoning
    # the single token that ends reasoning, if there is one; reasoning tokens can then be counted
    reasoning_ends_with: int | None = None
    # the functions with the types of their arguments, for calls that are parsed when complete
    typed: list[dict[str, Any]] | None = None


class AnswerReader:
    """Parses the answers of one model.

    Args:
        formats: the model's formats for calls and reasoning.
        special: the ids of its special tokens by their texts.
        token_id: returns the id of a token's text; None if there is none.
        encode: text to ids, without added special tokens.
    """

    def __init__(
        self,
        formats: Formats,
        special: Mapping[int, str] | None = None,
        token_id: Callable[[str], int | None] = lambda text: None,
        encode: Callable[[str], list[int]] = lambda text: [],
    ):
        self.formats = formats
        self.special = special or {}
        self._reasoning_end = None if formats.reasoning is None else token_id(formats.reasoning.close)
        self._opening: tuple[int, ...] = ()
        self._last_words: tuple[int, ...] = ()
        if formats.reasoning is not None and self._reasoning_end is not None:
            mark = formats.reasoning.open.strip()
            found = token_id(mark)
            self._opening = tuple(encode(mark)) if found is None else (found,)
            self._last_words = tuple(encode(_LAST_WORDS))
        self._templates: dict[bool, Any] = {}
        if formats.calls is not None or formats.reasoning is not None:
            _library()  # no request waits for the import
        self._shown = {calls: self._marks(calls) for calls in (False, True)}

    @property
    def limits_reasoning(self) -> bool:
        """Whether a single token ends the model's reasoning, so that it can be forced."""
        return bool(self._opening)

    def budget(self, tokens: int, parsing: Parsing) -> ReasoningBudget:
        """A limit on the reasoning of answers parsed with these settings."""
        assert self._reasoning_end is not None
        return ReasoningBudget(
            tokens=tokens,
            open=self._opening,
            close=self._reasoning_end,
            last_words=self._last_words,
            begun=parsing.begins_in_reasoning,
        )

    def _marks(self, calls: bool) -> frozenset[int]:
        """The special tokens among the marks that separate parts, with or without those of calls."""
        texts: list[str] = []
        if self.formats.reasoning is not None:
            texts += [self.formats.reasoning.open, self.formats.reasoning.close]
        if calls and (found := self.formats.calls) is not None:
            texts += [found.head or "", str(found.field)]
            texts += [text for region in found.regions for text in region.values()] + [*found.drops]
        marks = "\n".join(texts)
        return frozenset(token for token, text in self.special.items() if text in marks or re.escape(text) in marks)

    def parsing(self, tools: Tools | None, prompt: str, final: str | None = None) -> Parsing | None:
        """The settings for parsing answers to a prompt; None for plain text.

        Args:
            tools: the functions that answers may call.
            prompt: the prompt as the template wrote it.
            final: the text of a last message that the answers continue.
        """
        calls = self.formats.calls if tools is not None else None
        reasoning = self.formats.reasoning
        if calls is None and reasoning is None:
            return None
        formats = Formats(calls=calls, reasoning=reasoning)
        if (template := self._templates.get(calls is not None)) is None:
            template = self._templates[calls is not None] = _compiled(_regions(formats))
        return Parsing(
            formats=formats,
            template=template,
            tools=tools if calls is not None else None,
            shown_special=self._shown[calls is not None],
            begins_in_reasoning=reasoning is not None and _begins_in(reasoning, prompt, final),
            reasoning_ends_with=self._reasoning_end,
            typed=_typed(tools) if tools is not None and calls is not None and calls.field is not None else None,
        )


def _typed(tools: Tools) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": one.name, "parameters": typed(one.parameters)}}
        for one in tools.functions
    ]


def _library() -> Any:
    """Import the answer parser. It imports `transformers` (half a second, 20 MB), and most models do not need it."""
    from transformers.utils import chat_parsing

    return chat_parsing


def _compiled(template: dict[str, Any]) -> Any:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    return load_response_template(template)


def _begins_in(reasoning: ReasoningFormat, prompt: str, final: str | None) -> bool:
    mark = reasoning.open.strip()
    if final is not None:
        return final.rfind(mark) > final.rfind(reasoning.close)
    return prompt.rstrip().endswith(mark)  # elsewhere it may be a user's text


def _regions(formats: Formats) -> dict[str, Any]:
    """A response template whose values are the raw texts of the regions, so that parsing cannot fail."""
    as_text = {"content": "text", "content_args": {"strip": False}, "repeats": True}
    fields: dict[str, Any] = {"content": as_text}
    if formats.reasoning is not None:
        fields["reasoning"] = {"open": formats.reasoning.open, "close": formats.reasoning.close, **as_text}
    if formats.calls is not None:
        for index, region in enumerate(formats.calls.regions):
            marks = {name: text for name, text in region.items() if name != "shown"}
            if formats.calls.field is None:
                marks.pop("close", None)  # the parser of the region finds its end
            else:
                # The opening text belongs to the value, because it may contain the function's name.
                pattern = marks.pop("open_pattern", None) or re.escape(marks.pop("open"))
                marks |= {
                    "open_pattern": f"(?P<opening_>{pattern})",
                    "transform": {"opening": "{opening_}", "content": "{content}"},
                }
            fields[f"{_CALLS}{index}"] = {**marks, **as_text}
        if formats.calls.drops:
            fields["dropped"] = {"open": list(formats.calls.drops), "close_pattern": "", **as_text}
    return {**_ANYWHERE, "fields": fields}


@dataclass(slots=True)
class AnswerParser:
    """Parses one answer."""

    parsing: Parsing
    called: bool = False
    reasoned: bool = False  # whether the answer has reasoning, perhaps empty
    reasons: bool = False  # whether the next text is reasoning
    _parser: Any = field(init=False)
    _calls: ToolCalls = field(init=False)
    _region: Region | None = None
    _kind: type[Part] | None = None  # kind of the last part
    _space: str = ""  # space that may turn out to stand between parts
    _between: bool = False  # whether space that comes now stands between parts
    _texted: bool = False  # whether there is text
    _ends_in_call: bool = False

    def __post_init__(self) -> None:
        formats, tools = self.parsing.formats, self.parsing.tools
        clear = formats.calls is None or not formats.calls.known_names_only
        self._calls = ToolCalls(
            names=None if clear or tools is None else tools.names,
            most=1 if tools is not None and not tools.parallel else None,
        )
        begins = self.parsing.begins_in_reasoning and formats.reasoning is not None
        self._parser = _library().ResponseParser(
            self.parsing.template, prefix=formats.reasoning.open if begins and formats.reasoning is not None else ""
        )
        list(self._parts(self._parser.initial_events))

    def feed(self, text: str) -> list[Part]:
        return self._tidied(self._parts(self._parser.feed(text)))

    def finish(self) -> list[Part]:
        """End the answer; returns the text that was held back."""
        events = self._parser.feed(_END)
        _, last = self._parser.finalize()
        events += last
        ending = next(event for event in reversed(events) if event["type"] == "region_chunk")
        ending["text"] = ending["text"].removesuffix(_END)
        parts = self._tidied(self._parts(events))
        if self._space and not self._between and not self._ends_in_call:
            parts.append(Reasoning(self._space) if self._kind is Reasoning else TextPart(self._space))
        return parts

    def _parts(self, events: Iterable[Mapping[str, Any]]) -> Iterable[Part]:
        for event in events:
            name, kind = event["field"], event["type"]
            if name == "content":
                if kind == "region_chunk":
                    yield TextPart(event["text"])
            elif name == "reasoning":
                self.reasoned, self.reasons = True, kind != "region_close"
                if kind == "region_chunk":
                    yield Reasoning(event["text"])
                else:
                    self._space, self._between, self._kind = "", True, Reasoning
            elif name.startswith(_CALLS):
                yield from self._in_region(int(name.removeprefix(_CALLS)), event)

    def _in_region(self, index: int, event: Mapping[str, Any]) -> Iterable[Part]:
        """New text of a region that should contain calls."""
        format, kind = self.parsing.formats.calls, event["type"]
        assert format is not None
        region = format.regions[index]
        if format.field is not None:
            if kind == "region_close":
                yield from self._whole(format, region, event["value"])
            return
        if kind == "region_open":
            opening, closing = region.get("shown", region.get("open", "")), region.get("close")
            if format.head is None:
                self._region = ObjectCalls(self._calls, opening, closing)
            else:
                self._region = NamedCalls(self._calls, opening, closing, re.compile(format.head))
            return
        assert self._region is not None
        if kind == "region_close":
            yield from self._region.close()
            return
        yield from self._region.feed(event["text"])
        if self._region.ended:
            rest, self._region = self._region.rest, None
            self._parser = _library().ResponseParser(self.parsing.template, prefix="")
            yield from self._parts(self._parser.feed(rest))

    def _whole(self, format: CallFormat, region: Mapping[str, Any], value: Mapping[str, str]) -> Iterable[Part]:
        text = value["opening"] + value["content"]
        cut, text = text.endswith(_END), text.removesuffix(_END)
        text = text if cut else text + region.get("close", "")
        calls = [] if cut and len(region) > 1 else _read_whole(format, region, text, self.parsing.typed)
        if not calls:
            yield TextPart(text)
        for name, arguments in calls:
            call = self._calls.begin(name)
            yield from call.told()
            yield from call.more(arguments)

    def _tidied(self, parts: Iterable[Part]) -> list[Part]:
        """Parts without the space between them; neighbours of the same kind are joined."""
        made: list[Part] = []
        for part in parts:
            if isinstance(part, CallPart):
                self._space, self._between, self._kind, self.called = "", not self._texted, CallPart, True
                self._ends_in_call = True
                made.append(part)
                continue
            kind = type(part)
            if kind is not self._kind:
                self._between = self._between or kind is Reasoning
                if kind is Reasoning or self._kind is Reasoning:
                    self._space = ""
                self._kind = kind
            text = self._space + part.text
            if self._between:
                text = text.lstrip(_SPACE)
            kept = text.rstrip(_SPACE)
            self._space = text[len(kept) :]
            if kept:
                self._between = self._ends_in_call = False
                self._texted = self._texted or kind is TextPart
                last = made[-1] if made else None
                if last is not None and type(last) is kind:
                    assert not isinstance(last, CallPart)
                    last.text += kept
                else:
                    made.append(kind(kept))
        return made


def _read_whole(
    format: CallFormat, region: Mapping[str, Any], text: str, tools: list[dict[str, Any]] | None
) -> Sequence[tuple[str, str]]:
    """Names and arguments of the calls in a region; none if it cannot be parsed."""
    assert format.field is not None
    transform = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    fields = {"tool_calls": {**region, "transform": transform, **format.field, "repeats": True}}
    try:
        read = _library().parse_response(text, {**_ANYWHERE, "fields": fields}, prefix="", tools=tools)
        calls = [call["function"] for call in read["tool_calls"]]
        return [(str(call["name"]), _as_text(call["arguments"])) for call in calls]
    except Exception:  # a model may write anything, and the patterns may come from a checkpoint
        return []


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
