"""Converts a request of /v1/responses to a chat request, and its answer to OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response
from pydantic import RootModel
from pydantic_core import from_json, to_json

from server.admission import OVERLOADED
from server.answering.background import Background, Patience, follow
from server.answering.blocks import AnswerBlocks
from server.answering.conversation import ConversationRun
from server.answering.events import Events
from server.answering.keeping import asked, note_failure, store_of
from server.answering.pieces import PieceMaker
from server.answering.prompt import Prompt
from server.answering.public_names import chat_request, public_name, public_names
from server.answering.reading import MAX_ID, Ignored, fail, read_text
from server.answering.response_events import NUM_OPENING, ResponseEvents, closing, completed, failed, opening
from server.answering.response_input import Item, to_messages
from server.answering.response_tools import ResponseTools, function_name, read_response_tools
from server.answering.streaming import EventStream, Wanted
from server.api.chat_schemas import ChatCompletionRequest, ChatPiece
from server.api.fields import refuse_unsupported
from server.api.response_schemas import ONE_ANSWER_FIELDS, ResponseRequest
from server.api.schemas import MAX_MESSAGES, ServedBody, Usage
from server.api.structure import check_value
from server.errors import ApiError, shown
from server.gates import Reservation
from server.response_store import StoreError

# This endpoint's names for a chat request's fields.
NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
# Fields of other endpoints that have another name here.
_ELSEWHERE = {**NAMES, "functions": "tools", "function_call": "tool_choice", "stop_sequences": "stop"}
_UNSUPPORTED = ("prompt", "moderation", "n", "best_of", "use_beam_search")
_LOGPROBS = "message.output_text.logprobs"
# Other values of `include` are always part of the answer, or belong to tools that do not exist here.
_INCLUDABLE = (
    _LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
# There are no summaries: reasoning comes unchanged, whatever is requested.
_SUMMARIES = (None, "auto", "concise", "detailed")
# Sampling parameters in an answer, and their neutral values.
_SHOWN_NUMBERS = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_FORMATS = ("text", "json_object", "json_schema")
_TERMS = (*ServedBody.model_fields, *ONE_ANSWER_FIELDS, "reasoning_budget")


def read_chat(
    body: ResponseRequest, items: Sequence[Mapping[str, Any]], ignored: Ignored
) -> tuple[ChatCompletionRequest, ResponseTools]:
    """The equivalent chat request, and its tools with the client's names. Raises ApiError if the request is invalid or
    not supported.

    Args:
        items: the items of the whole conversation.
        ignored: receives the names of ignored parts.
    """
    _refuse(body)
    ignored.update(_ignored_fields(body))
    fields: dict[str, Any] = {name: getattr(body, name) for name in _TERMS if getattr(body, name) is not None}
    if len(items) > MAX_MESSAGES:
        fail("input", f"The conversation has {len(items)} items, but at most {MAX_MESSAGES} are allowed.")
    fields["messages"] = to_messages(items, body.instructions)
    fields["stream"] = bool(body.stream or body.background)
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if _LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    tools = read_response_tools(body.tools or (), items, ignored)
    if body.tool_choice is not None and (tools.chat or body.tool_choice != "auto"):
        fields["tool_choice"] = _chat_choice(body.tool_choice, ignored)
    if body.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    if (format_ := _read_format(body.text)) is not None:
        fields["response_format"] = format_
    variables = dict(body.chat_template_kwargs or {})
    if (effort := _read_effort(body.reasoning)) is not None:
        fields["reasoning_effort"] = effort
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    if variables:
        fields["chat_template_kwargs"] = variables
    chat = chat_request(fields, NAMES)
    chat.tools = tools.chat or None  # which may be more than a chat request allows
    return chat, tools


def _refuse(body: ResponseRequest) -> None:
    unknown = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    if body.background and body.store is False:
        fail("background", "background needs the answer to be stored: leave store out, or send true.")
    for name in _UNSUPPORTED:
        if name in unknown:
            fail(name, f"{name} is not supported. Remove it.", code="unsupported_parameter")
    for name, here in _ELSEWHERE.items():
        if name in unknown:
            fail(name, f"{name} is not a field of /v1/responses: send {here}.", code="unsupported_parameter")
    refuse_unsupported(unknown)
    if body.truncation not in (None, "disabled", "auto"):
        fail("truncation", f"truncation must be disabled or auto, got {shown(body.truncation)}.")
    if body.stream_options is not None and not body.stream:
        fail("stream_options", "stream_options is only allowed when stream is true.")
    for name in body.include or ():
        if name not in _INCLUDABLE:
            fail("include", f"include must hold names such as {_LOGPROBS}, got {shown(name)}.")
    if body.top_logprobs and _LOGPROBS not in (body.include or ()):
        fail("top_logprobs", f"top_logprobs ({body.top_logprobs}) needs {_LOGPROBS} in include.")


def _chat_choice(choice: Any, ignored: Ignored) -> Any:
    if choice in ("none", "auto", "required"):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom"):
        return _named(choice, "tool_choice")
    if kind == "allowed_tools":
        given = choice.get("tools")
        if not isinstance(given, list):
            fail("tool_choice.tools", f"tool_choice.tools must be a list, got {shown(given)}.")
        allowed = []
        for index, tool in enumerate(given):
            where = f"tool_choice.tools[{index}]"
            if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
                fail(where, f"{where} must be an object with type and name, got {shown(tool)}.")
            if tool["type"] in ("function", "custom"):
                allowed.append(_named(tool, where))
            else:
                ignored.add(f"tools.{tool['type']}")
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    if isinstance(kind, str):
        message = f"tool_choice.type is {shown(kind)}, but no tools run on this server; function, custom and"
        fail("tool_choice.type", f"{message} allowed_tools are supported.", code="unsupported_parameter")
    wanted = 'none, auto, required or {"type": "function", "name": ...}'
    fail("tool_choice", f"tool_choice must be {wanted}, got {shown(choice)}.")


def _named(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    namespace = None if tool.get("namespace") is None else read_text(tool, "namespace", where, most=64)
    return {"type": "function", "function": {"name": function_name(read_text(tool, "name", where, most=64), namespace)}}


def _read_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    given = (text or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") not in _FORMATS:
        wanted = f"an object whose type is {', '.join(_FORMATS)}"
        fail("text.format", f"text.format must be {wanted}, got {shown(given)}.")
    kind = given["type"]
    if kind == "text":
        return None
    check_value(given, "text.format")
    if kind == "json_object":
        return {"type": "json_object"}
    names = ("name", "schema", "strict", "description")
    return {"type": kind, "json_schema": {name: given[name] for name in names if given.get(name) is not None}}


def _read_effort(reasoning: Mapping[str, Any] | None) -> str | None:
    given = reasoning or {}
    effort = given.get("effort")
    for name in ("summary", "generate_summary"):
        if given.get(name) not in _SUMMARIES:
            wanted = "auto, concise or detailed"
            fail(f"reasoning.{name}", f"reasoning.{name} must be {wanted}, got {shown(given[name])}.")
    if effort is None:
        return None
    return read_text(given, "effort", "reasoning", least=1, most=64)


def _ignored_fields(body: ResponseRequest) -> list[str]:
    text = [f"text.{name}" for name in body.text or () if name != "format"]
    known = ("effort", "summary", "generate_summary")
    reasoning = [f"reasoning.{name}" for name in body.reasoning or () if name not in known]
    unknown = [name for name in body.ignored_fields() if getattr(body, name) is not None]
    return unknown + text + reasoning + ["truncation"] * (body.truncation == "auto")


def conversation_id(given: Any) -> str:
    """The id in the field `conversation`, which is a string or an object with an id. Raises ApiError if it is
    neither."""
    id_ = given.get("id") if isinstance(given, dict) else given
    if not isinstance(id_, str) or not 0 < len(id_) <= MAX_ID:
        wanted = f"the id of a conversation, at most {MAX_ID} characters, or an object with it"
        fail("conversation", f"conversation must be {wanted}, got {shown(given)}.")
    return id_


def _number(body: ResponseRequest, name: str, defaults: Mapping[str, Any]) -> float:
    """The effective value of a sampling parameter: the request's, the model's default, or the neutral value."""
    given = getattr(body, name)
    return float(defaults.get(name, _SHOWN_NUMBERS[name]) if given is None else given)


def _frame(
    body: ResponseRequest,
    tools: ResponseTools,
    defaults: Mapping[str, Any],
    *,
    id_: str,
    model: str,
    created: int,
    store: bool,
) -> dict[str, Any]:
    """The answer before it has any content."""
    given = body.reasoning or {}
    return {
        "id": id_,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "store": store,
        "previous_response_id": body.previous_response_id,
        "conversation": None if body.conversation is None else {"id": conversation_id(body.conversation)},
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": given.get("effort"), "summary": given.get("summary")},
        "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": tools.shown,
        "top_logprobs": body.top_logprobs or 0,
        **{name: _number(body, name, defaults) for name in _SHOWN_NUMBERS},
        "truncation": "disabled",
        "background": bool(body.background),
        "service_tier": "default",
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


@dataclass(slots=True)
class ResponseRun(ConversationRun[ChatPiece]):
    """Answers a request of /v1/responses."""

    id_prefix = "resp_"
    stream_keeps_answer = True
    asked: ResponseRequest = field(kw_only=True)
    items: list[Item] = field(kw_only=True)  # the request's own input
    called: ResponseTools = field(kw_only=True)  # the functions that its answer may call
    frame: dict[str, Any] = field(default_factory=dict)
    _final: dict[str, Any] | None = None
    _cancelled: bool = False
    _kept_status: str = "queued"  # stored response
    _made: Background | None = None  # set if the answer does not depend on its client
    _patience: Patience | None = None  # set if the request may wait for room
    _opened: bool = False  # whether the first events were sent while it waited
    _num_tokens: int = 0  # tokens of the prompt, once known

    async def respond(self, request: Request) -> Response:
        """Answer in the form that the body requests; a streaming answer can be cancelled."""
        if self.asked.background:
            store_of(self.service, "background")
        store = self.service.response_store is not None and self.asked.store is not False
        self.frame = _frame(
            self.asked,
            self.called,
            self.service.client.info.decoding or {},
            id_=self.request_id,
            model=self.service.adapter_of(self.body.model) or self.service.model_id,
            created=self.created,
            store=store,
        )
        if self.asked.background:
            return await self._respond_later(request)
        return await ConversationRun.respond(self, request)

    async def _respond_later(self, request: Request) -> Response:
        """The answer at its beginning, or its stream; it continues without the client."""
        key, counts = getattr(request.state, "api_key", None), self.service.commons.keys
        headers, reservation = self.prepare(request), None
        if self.service.queueing.num_inside < self.service.settings.max_num_queued_reqs:
            self._patience = Patience(self.service, self.terms)
        with self.record.refusals():
            try:
                reservation = await self.admitted(patient=self._patience is not None)
            except ApiError as problem:
                if not self._waits(problem):
                    raise
        events, streamed = self.record.streamed(self._events_in_turn(reservation)), bool(self.asked.stream)
        made = Background(self.service, events, streamed, self._keep_news, self.failing, self.interrupted)
        if key is not None:  # until the answer has ended, not only this request
            await counts.begin(key.tenant, None, None)

        def ended() -> None:
            self.service.background.pop(self.request_id, None)
            if key is not None:
                counts.end(key.tenant)

        self._made = self.service.background[self.request_id] = made
        await asked(self.service, made.start(ended))
        if not self.asked.stream:
            return Response(to_json(self.frame), media_type="application/json", headers=headers)
        events = follow(self.service, self.request_id, self.terms.tenant, -1)
        return EventStream(events, Wanted(self.service.drain, lambda reason: None), headers)

    def _waits(self, problem: ApiError) -> bool:
        """Whether the request waits instead of being refused."""
        return self._patience is not None and problem.code == OVERLOADED and self._stream is None

    async def _events_in_turn(self, reservation: Reservation | None) -> AsyncGenerator[str, None]:
        """The answer as events; it is queued while there is no room."""
        shape, tools = self.shape, self.tools  # the prompt may change it
        while True:
            if reservation is None:
                assert self._patience is not None
                self.service.running_responses[self.request_id] = self
                try:
                    if not self._opened:
                        self._opened = True
                        yield opening(self.frame)
                    reservation = await self._patience.reservation(lambda: self.admitted(patient=True))
                finally:
                    self.ended()
                if reservation is None:
                    yield self._end({**self.frame, "status": "cancelled"})
                    return
                self.service.running_responses[self.request_id] = self
            try:
                async with aclosing(self.events_of(reservation)) as events:
                    async for item in events:
                        if self._cancelled:  # while the prompt was made
                            self.stop("cancel")
                        yield item
                return
            except ApiError as problem:
                if not self._waits(problem):
                    raise
                reservation, self.shape, self.tools = None, shape, tools

    def _end(self, final: dict[str, Any]) -> str:
        """The last event of an answer that the engine has not begun."""
        self._final = final
        return closing(NUM_OPENING, final)

    def failing(self, problem: ApiError) -> str:
        if self._opened and self._stream is None:
            return self._end(failed(self.frame, problem))
        return ConversationRun.failing(self, problem)

    async def _keep_news(self, first: int) -> bool:
        """Write the answer so far, and its events from this number on, to the store. Returns whether this succeeded."""
        store, made = self.service.response_store, self._made
        assert store is not None
        assert made is not None
        events = made.events[first:] if self.asked.stream else []
        ids: Any = (self.request_id, self.terms.tenant)
        if not first:
            frame, given = to_json(self.frame).decode(), to_json(self.items).decode()
            previous = self.asked.previous_response_id
            await store.begin(*ids, previous=previous, frame=frame, input=given, events=events)
            return True
        final = self._stream.final if isinstance(self._stream, ResponseEvents) else self._final
        news: dict[str, Any] = {"events": events, "first": first}
        if final is not None:
            news["frame"], news["output"] = await self.made(lambda: _parts(final))
        elif self.frame["status"] != self._kept_status:
            news["frame"], _ = _parts(self.frame)
        elif not events:
            return True
        status = self.frame["status"]
        try:
            await store.update(*ids, **news)
        except StoreError as problem:
            note_failure(self.service, problem)
            return False
        self._kept_status = status
        return True

    def ignored_fields(self) -> list[str]:
        calls = self.service.answers.formats.calls
        held = calls is not None and calls.writing is not None and calls.writing.as_json
        formats = () if held else (f"tools.{name}.format" for name in self.called.enforced)
        return [*ConversationRun.ignored_fields(self), *formats]

    def size(self) -> tuple[int, int]:
        prompts, tokens = ConversationRun.size(self)
        return prompts, self._num_tokens or tokens

    async def prompts(self) -> list[Prompt]:
        if self.tools is not None and self.called.enforced:
            self.tools = self.tools.enforcing(self.called.enforced)
        with public_names(NAMES):
            prompts = await ConversationRun.prompts(self)
        self._num_tokens = len(prompts[0].token_ids)
        if self.parsing is not None and self.shape.logprobs is not None:
            # A token may belong to text, to a call and to the mark between them.
            message = (
                f"{_LOGPROBS} is not supported if reasoning or calls are separated from the text: leave it or the "
                "tools out, or use /v1/chat/completions."
            )
            fail("include", message, code="unsupported_parameter")
        return prompts

    def join(self, pieces: list[ChatPiece]) -> list[ChatPiece]:
        return pieces

    def whole(self, choices: list[ChatPiece], usage: Usage) -> RootModel[dict[str, Any]]:
        blocks = AnswerBlocks()
        for piece in choices:
            blocks.feed(piece)
        blocks.finish()
        self._final = completed(self.frame, blocks, usage, self.called.name_of)
        return RootModel[dict[str, Any]].model_construct(self._final)

    def events(self, maker: PieceMaker[ChatPiece]) -> ResponseEvents:
        self.service.running_responses[self.request_id] = self
        return ResponseEvents(maker, self.frame, self.called.name_of, opened=self._opened)

    def ended(self) -> None:
        self.service.running_responses.pop(self.request_id, None)

    async def settle(self, body: str) -> str:
        assert self._final is not None
        if await self._kept(self._final):
            return body
        return await self.made(lambda: to_json({**self._final, "store": False}).decode())  # type: ignore[dict-item]

    async def settle_stream(self, events: Events[ChatPiece]) -> str:
        assert isinstance(events, ResponseEvents)
        final = events.finish()
        if self._cancelled:
            final |= {"status": "cancelled", "error": None}
        if not await self._kept(final):
            final["store"] = False
        return await self.made(events.closing)

    def cancel(self) -> dict[str, Any]:
        """End the stream; returns the answer so far."""
        self._cancelled = True
        if self._stream is None and self._patience is not None:
            self._patience.give_up()
            self.record.abort("cancel")
            return {**self.frame, "status": "cancelled"}
        assert isinstance(self._stream, ResponseEvents)
        self.stop("cancel")
        return self._stream.cancel()

    def public_name(self, param: str | None) -> str | None:
        return public_name(param, NAMES)

    async def _converse(self, final: Mapping[str, Any]) -> None:
        """Add the request and its answer to the conversation, if there is one."""
        store, conversation = self.service.response_store, self.frame["conversation"]
        if store is None or conversation is None or final["status"] not in ("completed", "incomplete"):
            return
        items = await self.made(lambda: from_json(to_json([*self.items, *final["output"]])))
        try:
            await asyncio.shield(store.conversations.add(conversation["id"], self.terms.tenant, items))
        except StoreError as problem:
            note_failure(self.service, problem)

    async def _kept(self, final: Mapping[str, Any]) -> bool:
        """Whether the answer is in the store, if it should be; the client gets its answer even if the store fails."""
        await self._converse(final)
        store = self.service.response_store
        if store is None or not self.frame["store"]:
            return not self.frame["store"]
        if self._made is not None:  # it is written with its last events
            return True
        (frame, output), given = await self.made(lambda: (_parts(final), to_json(self.items).decode()))
        try:
            await asyncio.shield(
                store.put(
                    self.request_id,
                    self.terms.tenant,
                    previous=self.asked.previous_response_id,
                    frame=frame,
                    input=given,
                    output=output,
                )
            )
        except StoreError as problem:
            note_failure(self.service, problem)
            return False
        return True


def _parts(answer: Mapping[str, Any]) -> tuple[str, str]:
    frame = {name: value for name, value in answer.items() if name != "output"}
    return to_json(frame).decode(), to_json(answer["output"]).decode()
