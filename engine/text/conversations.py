"""Converting conversations to prompts with chat templates, rendered as in `transformers`."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from engine.configs.listing import list_models_once
from engine.text.pictures import with_parts

Messages = list[dict[str, Any]]

# A template that distinguishes the role writes it as a string, unlike the word developers in its prose.
_KNOWS_DEVELOPER = re.compile(r"""["']developer["']""")
# Mistral's templates need ids of nine letters and digits, and fail on others.
_SHORT_IDS = re.compile(r"""id['"]?\]?\s*\|\s*length\s*!=\s*9""")
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}", re.ASCII)
# Phi-4-mini's template reads tools from the system message, as JSON text; the wording is from its model card.
_TOOLS_OF_MESSAGE = re.compile(r"""message(\.tools|\[['"]tools['"]\])""")
_HAS_TOOLS = "You are a helpful assistant with some tools."
# A template that distinguishes missing from empty content may take empty content for an answer without calls.
_KNOWS_NO_CONTENT = re.compile(r"""(?<!_)content['"]?\]?\s+is\s+(not\s+)?none""")


def fit_messages(
    messages: Sequence[Mapping[str, Any]], template: str, tools: Sequence[Mapping[str, Any]] | None
) -> Messages:
    """Messages as this template can read them. The role developer becomes system if the template does not know it."""
    fitted = [dict(message) for message in messages]
    if tools is not None and _TOOLS_OF_MESSAGE.search(template):
        if fitted[0]["role"] not in ("system", "developer"):
            fitted.insert(0, {"role": "system", "content": _HAS_TOOLS})
        fitted[0]["tools"] = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    renames, shortens = not _KNOWS_DEVELOPER.search(template), bool(_SHORT_IDS.search(template))
    for message in fitted:
        if renames and message["role"] == "developer":
            message["role"] = "system"
        calls = message.get("tool_calls")
        if shortens and calls:
            message["tool_calls"] = [{**call, "id": _short(str(call.get("id", "")))} for call in calls]
        if shortens and "tool_call_id" in message:
            message["tool_call_id"] = _short(message["tool_call_id"])
    return fitted


def load_renderer() -> Callable[..., tuple[list[str], Any]]:
    """Return the function that renders. Its import is slow, and a process that only sends conversations does not need
    it."""
    list_models_once()
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template  # type: ignore[no-any-return]


def render_conversation(
    template: str, messages: Messages, *, image_mark: str | None = None, image_text: str | None = None, **given: Any
) -> str:
    """Convert messages to a prompt in `transformers`' sandbox. Raises ValueError if the template refuses these
    messages, or fails on them; the text is the template's.

    Args:
        messages: {"role": ..., "content": ...} each; arguments of tool calls are JSON text.
        image_mark, image_text: as `engine.text.pictures.with_parts` takes them.
        given: tools, documents, add_generation_prompt, continue_final_message, and variables that the template may use.
    """

    def render(probe: Messages) -> str:
        return _rendered(template, probe, given | {"continue_final_message": False})

    return _rendered(template, with_parts(template, messages, render, mark=image_mark, text=image_text), given)


def _rendered(template: str, messages: Messages, given: Mapping[str, Any]) -> str:
    refusal: Exception | None = None
    for form in _forms(template, messages):
        try:
            texts, _ = load_renderer()(conversations=[form], chat_template=template, **given)
        except MemoryError:
            raise
        except Exception as problem:  # a template may fail in any way on messages it was not made for
            refusal = refusal or problem
        else:
            return str(texts[0])
    raise ValueError(str(refusal) or type(refusal).__name__) from refusal


def _forms(template: str, messages: Messages) -> Iterator[Messages]:
    """The messages in the forms in which templates expect calls, the best first.

    The documentation of `transformers` says that arguments are objects; some templates were made for text, and fail on
    objects. If an answer held calls and no text, its content is missing or empty.
    """
    if not any("tool_calls" in message for message in messages):
        yield messages
        return
    contents = (None, "") if _KNOWS_NO_CONTENT.search(template) else ("",)
    for content, objects in itertools.product(contents, (True, False)):
        yield [_with_calls(message, content, objects) if "tool_calls" in message else message for message in messages]


def _with_calls(message: dict[str, Any], empty: str | None, objects: bool) -> dict[str, Any]:
    calls = message["tool_calls"]
    if objects:
        calls = [{**call, "function": _with_object(call["function"])} for call in calls]
    return {**message, "content": message["content"] or empty, "tool_calls": calls}


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    text = function.get("arguments") or ""
    if not isinstance(text, str):  # it is an object already
        return function
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):  # a model may have written anything
        return function
    return {**function, "arguments": arguments} if isinstance(arguments, dict) else function


def _short(id_: str) -> str:
    """An id of nine letters and digits: the id itself, if it is one."""
    return id_ if _SHORT_ID.fullmatch(id_) else hashlib.sha256(id_.encode()).hexdigest()[:9]
