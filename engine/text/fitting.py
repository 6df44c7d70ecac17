"""Rewriting messages so that a chat template shows all of them.

A template supports some orders of roles. It refuses other orders, or silently drops a message. Rendering an order once,
with marks for texts, shows which is the case: if every mark appears in order, the messages stay unchanged.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.text.writing import Writing

Messages = list[dict[str, Any]]
Roles = tuple[str, ...]
# Whether a template shows all messages of these roles. "call" is the assistant's function call, "said call" a call with
# text before it, "calls" two calls in one message. The order ("user", "call", "assistant", "tool") is a call with text
# after it.
Shows = Callable[[Roles], bool]

_LEADING = ("system", "developer")
_PARAGRAPH = "\n\n"
_IDS = ("abcdef123", "abcdef124")  # the ids of a probe's calls; Mistral's templates need nine letters and digits
_PROMPT = """\
You can call these functions. Each line describes one:
<tools>
{tools}
</tools>
To call a function, write this, with its name and its arguments, a JSON object:
{call}
The results come between <tool_response> and </tool_response>. Without a call, answer in plain text."""


def mark(index: int) -> str:
    """The placeholder for the text of a probe message."""
    return f"mark{index}x"


def _called(role: str, index: int) -> list[str]:
    """The arguments of a probe's calls, which do not occur in texts."""
    return [f"{mark(index)}{sign}" for sign in ("-." if role == "calls" else "-")]


def _call(id_: str, text: str) -> dict[str, Any]:
    function = {"name": "find", "arguments": json.dumps({"text": text})}
    return {"id": id_, "type": "function", "function": function}


def probe(roles: Roles) -> Messages:
    """Messages of these roles whose texts are marks."""
    messages: Messages = []
    for index, role in enumerate(roles):
        message: dict[str, Any] = {"role": role, "content": mark(index)}
        if "call" in role:
            ids = _IDS if role == "calls" else _IDS[:1]
            calls = [_call(id_, called) for id_, called in zip(ids, _called(role, index), strict=True)]
            content = mark(index) if role == "said call" else ""
            message = {"role": "assistant", "content": content, "tool_calls": calls}
        elif role == "tool":
            message["tool_call_id"] = _IDS[roles[max(index - 2, 0) : index] == ("calls", "tool")]
        messages.append(message)
    return messages


def shows_all(text: str, roles: Roles) -> bool:
    """Whether all marks of a probe are in its text, in order."""
    at = 0
    for index, role in enumerate(roles):
        marks = [] if role in ("call", "calls") else [mark(index)]
        for wanted in [*marks, *_called(role, index)] if "call" in role else marks:
            at = text.find(wanted, at) + 1
            if not at:
                return False
    return True


def shows_by(render: Callable[[Messages], str]) -> Shows:
    """Tests whether a template shows all messages of some roles, by rendering them once. `render`: renders messages
    with the template; ValueError if the template refuses them."""

    def shows(roles: Roles) -> bool:
        try:
            return shows_all(render(probe(roles)), roles)
        except ValueError:
            return False

    return functools.cache(shows)


def fitted(messages: Messages, shows: Shows, writing: Writing) -> Messages:
    """The same messages, changed as little as the template requires. `writing`: the model's format of calls, for a
    template that cannot write them."""
    made = _with_calls(messages, shows, writing)
    lead = next((place for place, one in enumerate(made) if one["role"] not in _LEADING), len(made))
    made = _system(made[:lead], made[lead:], shows) + [_later(one, shows) for one in made[lead:]]
    if _follow(made, "tool", "user") and not shows(("user", "call", "tool", "user")):
        made = _joined(made, lambda one, next_: (one["role"], next_["role"]) == ("tool", "user"))
    for role, around in (("user", ("user", "user")), ("assistant", ("user", "assistant", "assistant", "user"))):
        if _follow(made, role, role) and not shows(around):
            made = _joined(made, lambda one, next_, role=role: one["role"] == next_["role"] == role)
    return made


def with_tool_prompt(messages: Messages, tools: Sequence[Mapping[str, Any]], writing: Writing) -> Messages:
    """The messages with a system message about the functions and the format of calls, which the template cannot
    describe."""
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    prompt = _PROMPT.format(tools=described, call=writing.written([("NAME", "ARGUMENTS")]))
    if messages and messages[0]["role"] in _LEADING:
        return [{**messages[0], "content": f"{messages[0]['content']}{_PARAGRAPH}{prompt}"}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _with_calls(messages: Messages, shows: Shows, writing: Writing) -> Messages:
    if not any("tool_calls" in one or one["role"] == "tool" for one in messages):
        return messages
    if not shows(("user", "call", "tool")):
        results = shows(("user", "assistant", "tool"))
        return [_call_as_text(one, writing) if results else _as_text(one, writing) for one in messages]
    apart = any(len(one.get("tool_calls") or ()) > 1 for one in messages)
    apart = apart and not shows(("user", "calls", "tool", "tool"))
    behind = ("user", "call", "assistant", "tool")
    goes_on = _follow(messages, "tool", "assistant")
    if apart or not (shows(behind) and (not goes_on or shows((*behind, "assistant", "user")))):
        messages = _calls_last(messages)
    if apart:
        messages = _one_by_one(messages)
    said = any(one.get("tool_calls") and one["content"] for one in messages)
    if said and not shows(("user", "said call", "tool")) and shows(("user", "assistant", "call", "tool", "assistant")):
        return list(itertools.chain.from_iterable(map(_parted, messages)))
    return messages


def _call_as_text(message: dict[str, Any], writing: Writing) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = writing.written([(function["name"], function["arguments"] or "{}") for function in functions])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": f"{message['content']}\n{calls}" if message["content"] else calls}


def _as_text(message: dict[str, Any], writing: Writing) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    return _call_as_text(message, writing)


def _calls_last(messages: Messages) -> Messages:
    """Move text between a call and its result before the call."""
    made: Messages = []
    for place, message in enumerate(messages):
        called = made[-1] if made and made[-1].get("tool_calls") and made[-1]["role"] == "assistant" else None
        answered = any(one["role"] == "tool" for one in messages[place + 1 : place + 2])
        if called is not None and answered and message["role"] == "assistant" and not message.get("tool_calls"):
            made[-1] = {**_one([{**called, "tool_calls": None}, message]), "tool_calls": called["tool_calls"]}
        else:
            made.append(message)
    return made


def _one_by_one(messages: Messages) -> Messages:
    """Split the calls of one message into separate messages, each before its result."""
    made: Messages = []
    rest = collections.deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            made.append(message)
            continue
        results = list(itertools.takewhile(lambda one: one["role"] == "tool", rest))
        by_id = collections.defaultdict[str, Messages](list)
        for result in results:
            by_id[result["tool_call_id"]].append(result)
            rest.popleft()
        for call in calls:
            made += [{**message, "tool_calls": [call]}, *by_id[call["id"]][:1]]
            del by_id[call["id"]][:1]
            message = {"role": "assistant", "content": ""}  # text and reasoning appear once, before the first call
        made += itertools.chain.from_iterable(by_id.values())  # further results, and results without a call
    return made


def _parted(message: dict[str, Any]) -> Messages:
    """Put the text before a call into a separate message."""
    if not message.get("tool_calls") or not message["content"]:
        return [message]
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    return [said, {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}]


def _system(lead: Messages, others: Messages, shows: Shows) -> Messages:
    roles = tuple(one["role"] for one in lead)
    if len(lead) > 1 and not shows((*roles[:2], "user")):
        lead = _joined(lead, lambda one, next_: True)
    # Some templates show the system message only if the last message is the user's.
    end: Roles = ()
    if any(one["role"] == "tool" for one in others):
        end = ("user", "call" if any(one.get("tool_calls") for one in others) else "assistant", "tool")
    elif others and others[-1]["role"] == "assistant":
        end = ("user", "assistant")
    ends = [("user",), end] if end and shows(end) else [("user",)]
    return [one if all(shows((one["role"], *end)) for end in ends) else {**one, "role": "user"} for one in lead]


def _later(message: dict[str, Any], shows: Shows) -> dict[str, Any]:
    """Move a message after the first message of the user or the assistant. A system message becomes a user message, if
    necessary."""
    role = message["role"]
    if role not in _LEADING:
        return message
    places = (("user", role), ("system", "user", "assistant", role, "user"))
    return message if all(map(shows, places)) else {**message, "role": "user"}


def _follow(messages: Messages, first: str, second: str) -> bool:
    return any((one["role"], next_["role"]) == (first, second) for one, next_ in itertools.pairwise(messages))


def _joined(messages: Messages, joins: Callable[..., bool]) -> Messages:
    """Merge neighbours into one message, which has the first one's fields, all reasoning and the last one's calls."""
    runs: list[Messages] = []
    for message in messages:
        if runs and not runs[-1][-1].get("tool_calls") and joins(runs[-1][0], message):
            runs[-1].append(message)
        else:
            runs.append([message])
    return [run[0] if len(run) == 1 else _one(run) for run in runs]


def _one(run: Messages) -> dict[str, Any]:
    calls = {"tool_calls": run[-1]["tool_calls"]} if run[-1].get("tool_calls") else {}
    joined = {
        name: _PARAGRAPH.join(message[name] for message in run if message.get(name))
        for name in ("content", "reasoning_content")
        if any(name in message for message in run)
    }
    return {**run[0], **joined, **calls}
