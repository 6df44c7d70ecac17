"""An answer of /v1/messages: its blocks and the events about their growth, in Anthropic's order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import RootModel
from pydantic_core import to_json

from engine import room_for_answer
from server.answering.blocks import AnswerBlock, AnswerBlocks
from server.answering.conversation import ConversationRun
from server.answering.events import Events
from server.answering.generation import Update
from server.answering.message_input import NAMES
from server.answering.pieces import PieceMaker
from server.answering.prompt import Prompt, Room, TooLongError
from server.answering.public_names import public_name, public_names
from server.answering.terms import DeadlineError
from server.api.chat_schemas import ChatPiece, ChatTokenLogprob
from server.api.message_schemas import ContentBlock, MessageDeltaUsage, MessageUsage
from server.api.schemas import Usage
from server.door.message_errors import message_error
from server.errors import ApiError

Message = dict[str, Any]

_ABSENT: Message = {"stop_details": None, "container": None}  # Anthropic's fields for features that Octavo lacks
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def usage_of(usage: Usage) -> MessageUsage:
    """The tokens so far, under this endpoint's names."""
    return {
        **tokens_of(usage),
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "inference_geo": None,
        "service_tier": "standard",
        "speed": None,
    }


def tokens_of(usage: Usage) -> MessageDeltaUsage:
    """The part of the usage that the last event repeats."""
    cached, details = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": None if details is None else {"thinking_tokens": details.reasoning_tokens},
        "server_tool_use": None,
    }


@contextmanager
def in_anthropics_words(max_model_len: int) -> Iterator[None]:
    """Change the error for a too long prompt into the sentence that clients parse in order to shorten the prompt."""
    try:
        yield
    except TooLongError as problem:
        message = f"prompt is too long: {problem.tokens} tokens > {max_model_len - 1} maximum"
        raise ApiError(400, message, param="messages", code=problem.code) from problem


def ending(blocks: AnswerBlocks, *, lowered: bool) -> Message:
    """The reason why the answer ended. `lowered`: whether the context left it less room than requested. Raises ApiError
    if the answer was cut off by its deadline or a failure."""
    reason, stop = blocks.finish_reason or "", blocks.stop_reason
    if reason not in _STOP_REASONS:
        if stop == "deadline":
            raise DeadlineError
        raise ApiError(
            500, "The server failed to complete this answer. See its log for the reason.", code="internal_error"
        )
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    if reason == "length" and lowered:
        return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
    return {"stop_reason": _STOP_REASONS[reason], "stop_sequence": None}


def block_of(block: AnswerBlock) -> ContentBlock:
    """A block in Anthropic's shape; a call that was cut off gets an empty input."""
    if block.kind == "text":
        return {"type": "text", "text": block.text, "citations": None}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {
        "type": "tool_use",
        "id": block.call_id,
        "name": block.name,
        "input": _object(block.text),
        "caller": {"type": "direct"},
        "toolset_name": None,
    }


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a model may write anything
        return {}
    return value if isinstance(value, dict) else {}


@dataclass(slots=True)
class MessageRun(ConversationRun[ChatPiece]):
    """Answers a request of /v1/messages."""

    id_prefix = "msg_"

    async def prompts(self) -> list[Prompt]:
        info = self.service.client.info
        with public_names(NAMES), in_anthropics_words(info.max_model_len):
            (prompt,) = await ConversationRun.prompts(self)
            length = len(prompt.token_ids)
            if room_for_answer(self.shape.params, info, length) < 1:
                raise Room(info.max_model_len, "messages").refusal(f"it has {length}", length)
        return [prompt]

    def join(self, pieces: list[ChatPiece]) -> list[ChatPiece]:
        return pieces

    def whole(self, choices: list[ChatPiece], usage: Usage) -> RootModel[Message]:
        blocks = AnswerBlocks()
        for piece in choices:
            blocks.feed(piece)
        blocks.finish()
        content = [block_of(block) for block in blocks.made]
        message = {
            **self._frame(),
            "content": content,
            **ending(blocks, lowered=self.lowered),
            "usage": usage_of(usage),
        }
        return RootModel[Message].model_construct(message)

    def events(self, maker: PieceMaker[ChatPiece]) -> MessageEvents:
        return MessageEvents(maker, self._frame(), lowered=self.lowered)

    def failing(self, problem: ApiError) -> str:
        return written("error", message_error(problem.status_code, problem.message))

    def public_name(self, param: str | None) -> str | None:
        return public_name(param, NAMES)

    def _frame(self) -> Message:
        return {
            "id": self.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.service.name_of(self.terms),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **_ABSENT,
            "diagnostics": None,
        }


def written(kind: str, fields: Mapping[str, Any]) -> str:
    return f"event: {kind}\ndata: {to_json({'type': kind, **fields}).decode()}\n\n"


class MessageEvents(Events[ChatPiece]):
    """Typed events."""

    silence = written("ping", {})

    def __init__(self, maker: PieceMaker[ChatPiece], frame: Message, *, lowered: bool):
        super().__init__(maker)
        self._frame = frame  # the answer without the fields that are only known later
        self._lowered = lowered  # whether the answer has less room than requested
        self._blocks = AnswerBlocks(self)
        self._written: list[str] = []

    def opening(self) -> str:
        usage = usage_of(self.maker.usage())
        return written("message_start", {"message": {**self._frame, "usage": usage}})

    def news(self, updates: Sequence[Update]) -> str:
        for update in updates:
            for news in self.maker.news(update):
                self._blocks.feed(news)
        return self._taken()

    def closing(self) -> str:
        self._blocks.finish()
        last = self._taken()
        try:
            delta = ending(self._blocks, lowered=self._lowered)
        except ApiError as problem:
            return last + written("error", message_error(problem.status_code, problem.message))
        last += written("message_delta", {"delta": delta | _ABSENT, "usage": tokens_of(self.maker.usage())})
        return last + written("message_stop", {})

    # ---------------------------------------------------------------- called as blocks grow

    def began(self, block: AnswerBlock) -> None:
        self._write("content_block_start", block, content_block=block_of(block))

    def grew(self, block: AnswerBlock, text: str, logprobs: Sequence[ChatTokenLogprob]) -> None:
        if block.kind == "text":
            delta = {"type": "text_delta", "text": text}
        elif block.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "input_json_delta", "partial_json": text}
        self._write("content_block_delta", block, delta=delta)

    def ended(self, block: AnswerBlock) -> None:
        self._write("content_block_stop", block)

    def _write(self, kind: str, block: AnswerBlock, **fields: Any) -> None:
        self._written.append(written(kind, {"index": block.index, **fields}))

    def _taken(self) -> str:
        taken, self._written = "".join(self._written), []
        return taken
