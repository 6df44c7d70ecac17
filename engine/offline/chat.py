"""Checks the conversations of `LLM.chat` and converts them to prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args

from engine.errors import InvalidRequestError
from engine.images.placing import ImagePlacer, image_part
from engine.interface.outputs import EngineInfo
from engine.interface.request import TokenInput
from engine.interface.values import brief
from engine.text.chat_templates import read_template
from engine.text.fitting import Messages, fitted, shows_by, with_tool_prompt
from engine.text.pictures import Pictures, only_image
from engine.text.tokenizer import Tokenizer
from engine.text.writing import HERMES

Message = Mapping[str, Any]
Tool = Mapping[str, Any] | Callable[..., Any]
ToolPrompt = Literal["auto", "off"]


def read_conversations(messages: Any, pictures: list[Pictures] | None = None) -> list[list[dict[str, Any]]]:
    """One conversation or several, with text as content. `pictures`: gets the images of each conversation; None: the
    model reads none. Raises InvalidRequestError: names the invalid message."""
    if not isinstance(messages, list | tuple) or not messages:
        _fail("messages", f"messages must be a conversation, a list of messages, or a list of these, {_got(messages)}.")
    if isinstance(messages[0], Mapping):
        return [_read_conversation(messages, "messages", pictures)]
    return [_read_conversation(item, f"messages[{place}]", pictures) for place, item in enumerate(messages)]


def _read_conversation(messages: Any, where: str, pictures: list[Pictures] | None) -> list[dict[str, Any]]:
    found = None if pictures is None else Pictures()
    if pictures is not None and found is not None:
        pictures.append(found)
    if not isinstance(messages, list | tuple) or not messages:
        _fail("messages", f"{where} must be a list of messages, {_got(messages)}.")
    return [_read_message(item, f"{where}[{place}]", found) for place, item in enumerate(messages)]


def _read_message(message: Any, where: str, pictures: Pictures | None) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        _fail("messages", f"{where} must be a dictionary with role and content, {_got(message)}.")
    content = message.get("content")
    if isinstance(content, list | tuple):
        parts = [_read_part(part, f"{where}.content[{place}]", pictures) for place, part in enumerate(content)]
        content = "\n".join(parts) if pictures is None else pictures.joined(parts)
    elif content is None and message.get("tool_calls"):
        content = ""
    elif not isinstance(content, str):
        _fail("messages", f"{where}.content must be a text or a list of text parts, {_got(content)}.")
    calls = message.get("tool_calls")
    if calls is None:
        return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}
    listed = isinstance(calls, list | tuple)
    if not listed or not all(isinstance(one, Mapping) and isinstance(one.get("function"), Mapping) for one in calls):
        _fail("messages", f"{where}.tool_calls must hold dictionaries with id, type and function, {_got(calls)}.")
    return {**message, "content": content}


def _read_part(part: Any, where: str, pictures: Pictures | None) -> str:
    image = None if pictures is None else image_part(part)
    if pictures is not None and image is not None:
        return pictures.add(image)
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        _fail("messages", f'{where} must be {{"type": "text", "text": ...}}; other parts are not read, {_got(part)}.')
    return text


def conversation_prompt(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    chat_template: str | None,
    tools: Sequence[Tool] | None,
    tool_prompt: ToolPrompt = "auto",
    pictures: Pictures | None = None,
    placer: ImagePlacer | None = None,
    **variables: Any,
) -> TokenInput:
    """The prompt of a conversation. Raises InvalidRequestError if there is no template, it does not support tools and
    tool_prompt is off, or it refuses these messages; ConfigError if the chat template does not exist.

    Args:
        pictures, placer: the images in the messages, and what reads them; None: there are none.
        tool_prompt: auto: a system message describes the tools if the template does not support tools; off: refuse.
    """
    template = None if chat_template is None else read_template(chat_template)
    template = template or tokenizer.need_chat_template(tools=tools is not None)
    if tool_prompt not in get_args(ToolPrompt):
        _fail("tool_prompt", f'tool_prompt must be "auto" or "off", {_got(tool_prompt)}.')
    described = None if tools is None else [_described(tool, f"tools[{place}]") for place, tool in enumerate(tools)]
    if described is not None and "tools" not in template:
        if tool_prompt == "off":
            _fail("tools", 'the chat template does not support tools. Leave them out, or set tool_prompt="auto".')
        messages, described = _with_tool_prompt(messages, described, tokenizer, template), None
    if pictures is not None and pictures.images and placer is not None:
        variables |= {"image_mark": pictures.mark, "image_text": placer.mark(tokenizer)}
    text = tokenizer.apply_chat_template(messages, chat_template=template, tools=described, **variables)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if pictures is None or not pictures.images or placer is None:
        return TokenInput(ids, text)
    return placer.input(ids, pictures.images, text, tokenizer, special=False)


def _with_tool_prompt(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, template: str
) -> Messages:
    """The conversation for a template that does not support tools: a system message describes them."""

    def render(probe: Messages) -> str:
        try:
            return tokenizer.apply_chat_template(probe, chat_template=template)
        except InvalidRequestError as error:
            raise ValueError(str(error)) from error

    try:
        return fitted(with_tool_prompt([dict(one) for one in messages], tools, HERMES), shows_by(render), HERMES)
    except KeyError as error:
        _fail("messages", f"a call of a tool or its result lacks {error}.")


def _described(tool: Tool, where: str) -> Mapping[str, Any]:
    if isinstance(tool, Mapping):
        if not isinstance(tool.get("function"), Mapping):
            _fail("tools", f'{where} must look like {{"type": "function", "function": {{...}}}}, {_got(tool)}.')
        return tool
    from transformers.utils import get_json_schema  # slow to import

    try:
        schema: Mapping[str, Any] = get_json_schema(tool)
    except Exception as error:  # a docstring or type hints are missing; transformers raises several kinds of errors
        _fail("tools", f"{where} cannot be described: {error}")
    return schema


def image_prompt(messages: Sequence[Message], pictures: Pictures) -> dict[str, Any]:
    """The prompt of an encoder-decoder model that reads one image. Raises InvalidRequestError: as `only_image`."""
    image, text = only_image(messages, pictures)
    return {"prompt": text, "multi_modal_data": {"image": image}}


def check_chats(info: EngineInfo) -> None:
    """Refuse a model that does not support conversations. Raises InvalidRequestError if the model has an encoder that
    does not read images."""
    if info.max_encoder_len is not None and not info.writes_of_images:
        _fail(
            "messages", f"{info.model} is an encoder-decoder model, which does not support conversations. Use generate."
        )


def _got(value: Any) -> str:
    return f"got {brief(value)}"


def _fail(param: str, message: str) -> NoReturn:
    raise InvalidRequestError(message, param=param, code="invalid_value")
