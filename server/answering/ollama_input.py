"""Converts requests of Ollama's clients to those of the chat path, and resolves their model names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine import NUMBER_RANGES
from server.answering.public_names import chat_request
from server.answering.reading import MAX_ID, Ignored, fail, read_text
from server.api.chat_schemas import ChatCompletionRequest
from server.api.fields import refuse_unsupported
from server.api.ollama_schemas import OllamaAnswerBody, OllamaChatRequest, OllamaGenerateRequest
from server.api.schemas import ServedBody
from server.context import Service
from server.errors import ApiError, shown

LATEST = "latest"
# The engine's parameters by the names of options.
_OPTIONS = {
    "num_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
# Chat requests' fields by this endpoint's names, for errors.
NAMES = {
    **{name: f"options.{option}" for option, name in _OPTIONS.items()},
    "response_format": "format",
    "json_schema": "format",
    "reasoning_effort": "think",
}
# Options about how Ollama computes. They change no answer.
_HARMLESS = frozenset(
    {
        "num_batch", "num_gpu", "main_gpu", "low_vram", "vocab_only", "use_mmap", "use_mlock", "num_thread", "numa",
        "draft_num_predict", "f16_kv", "embedding_only", "logits_all",
    }
)  # fmt: skip
# Options with the values at which they ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "tfs_z": (0, 1),
    "repeat_last_n": (-1,),
    "penalize_newline": (True,),
    "num_keep": (0,),
}
_PARTS = {"mirostat_tau": "mirostat", "mirostat_eta": "mirostat"}
_TERMS = tuple(name for name in ServedBody.model_fields if name != "model")


# ---------------------------------------------------------------- names of models


def served_names(service: Service) -> list[str]:
    """The served model's name, then those of the adapters."""
    return [service.model_id, *service.client.adapters]


def tagged(name: str) -> str:
    """The name with its tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:{LATEST}"


def find_model(service: Service, name: str | None) -> str | None:
    """The served name that a client means, whether it has the tag latest or not; None: the request names none. Raises
    ApiError: 404, code model_not_found."""
    if name is None:
        return None
    names = served_names(service)
    if name in names:
        return name
    wanted = tagged(name).casefold()
    for served in names:
        if tagged(served).casefold() == wanted:
            return served
    if any(tagged(alias).casefold() == wanted for alias in service.aliases):
        return None  # it stands for the model
    service.check_model(name)
    return None  # a name that stands for any model


# ---------------------------------------------------------------- options


def read_options(body: OllamaAnswerBody, service: Service, ignored: Ignored) -> dict[str, Any]:
    """The sampling fields of a chat request or a completion that the options, and the fields beside them, ask for.
    `ignored`: collects the names of what is left out or lowered. Raises ApiError: something is wrong, or not
    supported."""
    unknown = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    refuse_unsupported(unknown)
    ignored.update(body.ignored_fields())
    ignored.update(name for name in ("truncate", "shift") if getattr(body, name) is False)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _TERMS if getattr(body, name) is not None}
    fields["stream"] = body.stream is not False
    given = {name: value for name, value in (body.options or {}).items() if value is not None}
    for option, name in _OPTIONS.items():
        if (value := _option(option, given.get(option))) is not None:
            fields[name] = value
    context = service.client.info.max_model_len
    for option, value in given.items():
        if option == "num_ctx":
            if not isinstance(value, int | float) or isinstance(value, bool):
                fail("options.num_ctx", f"options.num_ctx must be a number, got {shown(value)}.")
            if value > context:
                ignored.add("options.num_ctx")
        elif option not in _OPTIONS and option not in _HARMLESS and not _asks_for_nothing(option, given):
            ignored.add(f"options.{option}")
    if body.format not in (None, ""):
        fields["response_format"] = (
            {"type": "json_object"}
            if body.format == "json"
            else {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
        )
    return fields


def _option(option: str, value: Any) -> Any:
    field = f"options.{option}"
    if option == "stop":
        texts = [value] if isinstance(value, str) else value
        if texts is not None and not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
            fail(field, f"{field} must be a string or a list of strings, got {shown(value)}.")
        return [text for text in texts or () if text] or None
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        fail(field, f"{field} must be a number, got {shown(value)}.")
    allowed = NUMBER_RANGES[_OPTIONS[option]]
    if allowed.integer and isinstance(value, float):
        if not value.is_integer():
            fail(field, f"{field} must be an integer, got {shown(value)}.")
        value = int(value)
    if option == "num_predict" and value <= 0:  # -1: until the answer ends; -2: until the context is full
        return None
    if option == "seed" and value < 0:
        return None
    if option == "top_k" and value < 0:
        return 0
    return value


def _asks_for_nothing(option: str, given: Mapping[str, Any]) -> bool:
    whole = _PARTS.get(option)
    if whole is not None:
        return given.get(whole, 0) in _NOTHING[whole]
    return given[option] in _NOTHING.get(option, ())


# ---------------------------------------------------------------- conversations


def read_chat(
    body: OllamaChatRequest | OllamaGenerateRequest,
    messages: Sequence[Any],
    model: str | None,
    service: Service,
    ignored: Ignored,
) -> ChatCompletionRequest:
    """The equivalent chat request. Raises ApiError: something is wrong, or not supported.

    Args:
        messages: messages in the form that Ollama's clients send.
        model: the served name.
        ignored: collects the names of what it leaves out or lowers.
    """
    fields = read_options(body, service, ignored)
    fields |= {"model": model, "messages": _read_messages(messages, sees=service.sees)}
    if body.logprobs or body.top_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    last: Mapping[str, Any] = fields["messages"][-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
        fields["continue_final_message"] = True
    if isinstance(body, OllamaChatRequest) and body.tools:
        fields["tools"] = body.tools
    if body.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": bool(body.think)}
        if isinstance(body.think, str):
            fields["reasoning_effort"] = "high" if body.think == "max" else body.think
        if body.think and service.answers.formats.reasoning is None:
            ignored.add("think")
    return chat_request(fields, NAMES)


def _with_images(content: Any, images: Any, where: str) -> Any:
    """A message's content, after its images, which are files in base64."""
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        fail(where, f"{where} must be a list of images in base64, got {shown(images)}.")
    shown_first = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [*shown_first, {"type": "text", "text": content}] if content else shown_first


def refuse_images(images: Any, where: str) -> None:
    """Refuse images for a model that reads none with a text. Raises ApiError if there are images."""
    if images:
        fail(where, f"{where} is not supported: this model reads text only. Remove it.", code="unsupported_parameter")


def _read_messages(given: Sequence[Any], *, sees: bool) -> list[Any]:
    """Copies of the messages in the form that chat requests have. The code for chat checks the copied fields. `sees`:
    the model reads images."""
    messages: list[Any] = []
    calls: list[tuple[str, Any]] = []  # ids and names of calls without a result
    for index, item in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(item, dict):
            fail(where, f"{where} must be an object with role and content, got {shown(item)}.")
        images = item.get("images")
        if not sees:
            refuse_images(images, f"{where}.images")
        role, content = item.get("role"), item.get("content")
        message: dict[str, Any] = {"role": role.lower() if isinstance(role, str) else role}
        message["content"] = "" if content is None else content
        if images:
            message["content"] = _with_images(message["content"], images, f"{where}.images")
        if message["role"] == "assistant" and item.get("thinking"):
            message["reasoning_content"] = read_text(item, "thinking", where)
        if item.get("tool_calls"):
            message["tool_calls"] = _read_calls(item["tool_calls"], where, index)
            calls = [(call["id"], call["function"].get("name")) for call in message["tool_calls"]]
        if message["role"] == "tool":
            message |= _named_result(item, where, calls)
        messages.append(message)
    return messages


def _read_calls(given: Any, where: str, index: int) -> list[dict[str, Any]]:
    where = f"{where}.tool_calls"
    if not isinstance(given, list):
        fail(where, f"{where} must be a list of calls, got {shown(given)}.")
    calls = []
    for number, call in enumerate(given):
        place = f"{where}[{number}]"
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            fail(place, f"{place} must be an object with a function, got {shown(call)}.")
        function = call["function"]
        arguments = function.get("arguments")
        if not isinstance(arguments, dict | str | None):
            fail(
                f"{place}.function.arguments", f"{place}.function.arguments must be an object, got {shown(arguments)}."
            )
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        made = {"id": call.get("id") or f"call_{index}_{number}", "type": "function"}
        calls.append({**made, "function": {"name": function.get("name"), "arguments": arguments}})
    return calls


def _named_result(item: Mapping[str, Any], where: str, calls: list[tuple[str, Any]]) -> dict[str, Any]:
    """The call that a result belongs to: by its id, else by the function's name, else the first without a result."""
    named: dict[str, Any] = {}
    name = item.get("tool_name")
    if name:
        named["name"] = read_text(item, "tool_name", where)
    if item.get("tool_call_id"):
        id_ = read_text(item, "tool_call_id", where, most=MAX_ID)
    else:
        same = [known for known, function in calls if not name or function == name]
        id_ = next(iter(same or [known for known, _ in calls]), "call_0")
    calls[:] = [call for call in calls if call[0] != id_]
    return {**named, "tool_call_id": id_}


def check_generate(body: OllamaGenerateRequest, *, sees: bool) -> None:
    """Refuse fields of /api/generate that are not supported, or contradict each other. `sees`: the model reads images.
    Raises ApiError: names the first one."""
    if not sees:
        refuse_images(body.images, "images")
    for name in ("raw", "suffix", "context") if body.images else ():
        if getattr(body, name):
            message = f"images cannot be used with {name}: the chat template says where they stand. Remove one of them."
            raise ApiError(400, message, param="images", code="invalid_value")
    if body.template:
        message = (
            "template is not supported: the model's own chat template makes the prompt. Send raw: true with a prompt "
            "that is ready for the model."
        )
        raise ApiError(400, message, param="template", code="unsupported_parameter")
    for name in ("system", "context") if body.raw or body.suffix else ():
        if getattr(body, name):
            other = "raw" if body.raw else "suffix"
            message = (
                f"{name} cannot be used with {other}, which sends the prompt without the chat template. Remove it."
            )
            raise ApiError(400, message, param=name, code="invalid_value")
