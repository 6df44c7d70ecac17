"""An answer of /v1/responses: its items and the events about their growth, in OpenAI's order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic_core import to_json

from server.answering.blocks import AnswerBlock, AnswerBlocks
from server.answering.events import Events
from server.answering.generation import Update
from server.answering.pieces import PieceMaker
from server.answering.response_tools import Called, as_input
from server.api.chat_schemas import ChatPiece, ChatTokenLogprob
from server.api.response_schemas import (
    OutputCall,
    OutputCustomCall,
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseUsage,
)
from server.api.schemas import Usage
from server.errors import ApiError

Response = dict[str, Any]
NameOf = Callable[[str], Called]  # the client's name for a function

NUM_OPENING = 2  # events


def usage_of(usage: Usage) -> ResponseUsage:
    """The tokens so far, under this endpoint's names."""
    details = usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0 if details is None else details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def completed(frame: Response, blocks: AnswerBlocks, usage: Usage, name_of: NameOf) -> Response:
    """The completed answer. `frame`: the answer without the fields that are only known at its end."""
    reason, problem = blocks.finish_reason, None
    status, details = "completed", None
    if reason == "length":
        status, details = "incomplete", {"reason": "max_output_tokens"}
    elif reason not in ("stop", "tool_calls"):
        status, problem = "failed", {"code": "server_error", "message": _cut_off(blocks)}
    return {
        **frame,
        "status": status,
        "completed_at": int(time.time()) if status == "completed" else None,
        "error": problem,
        "incomplete_details": details,
        "output": [item_of(block, name_of) for block in blocks.made],
        "usage": usage_of(usage),
    }


def _cut_off(blocks: AnswerBlocks) -> str:
    if blocks.stop_reason == "deadline":
        return "The request's time limit passed before its answer was complete."
    return "The server failed to complete this answer. See its log for the reason."


def item_of(block: AnswerBlock, name_of: NameOf) -> OutputItem:
    status: Any = "in_progress" if not block.ended else "completed" if block.complete else "incomplete"
    if block.kind == "text":
        content = [_text_part(block)] if block.parts or block.ended else []
        return {"type": "message", "id": block.id, "status": status, "role": "assistant", "content": content}
    if block.kind == "reasoning":
        thought = [_thought_part(block)] if block.parts or block.ended else []
        return {"type": "reasoning", "id": block.id, "status": status, "summary": [], "content": thought}
    called = name_of(block.name)
    item: Any = {"id": block.id, "status": status, "call_id": block.call_id, "name": called.name}
    if called.namespace is not None:
        item["namespace"] = called.namespace
    if called.custom:
        item |= {"type": "custom_tool_call", "input": as_input(block.text) if block.ended else ""}
    else:
        item |= {"type": "function_call", "arguments": block.text}
    call: OutputCall | OutputCustomCall = item
    return call


def _text_part(block: AnswerBlock) -> OutputText:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": block.logprobs}


def _thought_part(block: AnswerBlock) -> ReasoningText:
    return {"type": "reasoning_text", "text": block.text}


def failed(response: Response, problem: ApiError) -> Response:
    """The answer after an error."""
    code = "server_error" if problem.status_code >= 500 else problem.code or "invalid_request_error"
    error = {"code": code, "message": problem.message}
    return {**response, "status": "failed", "completed_at": None, "incomplete_details": None, "error": error}


def opening(frame: Response) -> str:
    """The first events, `NUM_OPENING` of them."""
    second = "queued" if frame["background"] else "in_progress"
    return written("response.created", 0, response=frame) + written(f"response.{second}", 1, response=frame)


def closing(number: int, final: Response) -> str:
    kind = "incomplete" if final["status"] == "cancelled" else final["status"]
    return written(f"response.{kind}", number, response=final)


def written(kind: str, number: int, **fields: Any) -> str:
    return f"event: {kind}\ndata: {to_json({'type': kind, 'sequence_number': number, **fields}).decode()}\n\n"


class ResponseEvents(Events[ChatPiece]):
    """Typed, numbered events. `opened`: whether the first events have been sent."""

    def __init__(self, maker: PieceMaker[ChatPiece], frame: Response, name_of: NameOf, *, opened: bool = False):
        super().__init__(maker)
        self._name_of = name_of  # returns the client's name for a function
        self._frame = frame  # the answer without the fields that are only known later
        self._blocks = AnswerBlocks(self)
        self._number = NUM_OPENING if opened else 0
        self._begun = not frame["background"]
        self._written: list[str] = []
        self.final: Response | None = None  # the whole answer, once it has ended

    # ---------------------------------------------------------------- called by the stream

    def opening(self) -> str:
        if self._number:
            return ""
        self._number = NUM_OPENING
        return opening(self._frame)

    def news(self, updates: Sequence[Update]) -> str:
        if updates and not self._begun:
            self._begun = True
            self._frame["status"] = "in_progress"
            self._write("response.in_progress", response=self._frame)
        for update in updates:
            for news in self.maker.news(update):
                self._blocks.feed(news)
        return self._taken()

    def finish(self) -> Response:
        """The whole answer; its last events come later."""
        self._blocks.finish()
        self.final = completed(self._frame, self._blocks, self.maker.usage(), self._name_of)
        return self.final

    def cancel(self) -> Response:
        """The answer so far. It does not change after this call."""
        ended = [block if block.ended else replace(block, ended=True) for block in self._blocks.made]
        return {
            **self._frame,
            "status": "cancelled",
            "output": [item_of(block, self._name_of) for block in ended],
            "usage": usage_of(self.maker.usage()),
        }

    def closing(self) -> str:
        final = self.final or self.finish()
        return self._taken() + closing(self._number, final)

    def failing(self, problem: ApiError) -> str:
        self._blocks.finish()
        response = completed(self._frame, self._blocks, self.maker.usage(), self._name_of)
        self.final = failed(response, problem)
        self._write("response.failed", response=self.final)
        return self._taken()

    # ---------------------------------------------------------------- called as blocks grow

    def began(self, block: AnswerBlock) -> None:
        self._write("response.output_item.added", output_index=block.index, item=item_of(block, self._name_of))
        if block.kind == "text":
            part: Mapping[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._write_of(block, "response.content_part.added", content_index=0, part=part)
        elif block.kind == "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            self._write_of(block, "response.content_part.added", content_index=0, part=part)

    def grew(self, block: AnswerBlock, text: str, logprobs: Sequence[ChatTokenLogprob]) -> None:
        if block.kind == "text":
            self._write_of(block, "response.output_text.delta", content_index=0, delta=text, logprobs=list(logprobs))
        elif block.kind == "reasoning":
            self._write_of(block, "response.reasoning_text.delta", content_index=0, delta=text)
        elif not self._name_of(block.name).custom:
            self._write_of(block, "response.function_call_arguments.delta", delta=text)

    def ended(self, block: AnswerBlock) -> None:
        if block.kind == "text":
            said = {"text": block.text, "logprobs": block.logprobs}
            self._write_of(block, "response.output_text.done", content_index=0, **said)
            self._write_of(block, "response.content_part.done", content_index=0, part=_text_part(block))
        elif block.kind == "reasoning":
            self._write_of(block, "response.reasoning_text.done", content_index=0, text=block.text)
            self._write_of(block, "response.content_part.done", content_index=0, part=_thought_part(block))
        elif self._name_of(block.name).custom:  # its input is known once all arguments are
            text = as_input(block.text)
            self._write_of(block, "response.custom_tool_call_input.delta", delta=text)
            self._write_of(block, "response.custom_tool_call_input.done", input=text)
        else:
            called = {"name": self._name_of(block.name).name, "arguments": block.text}
            self._write_of(block, "response.function_call_arguments.done", **called)
        self._write("response.output_item.done", output_index=block.index, item=item_of(block, self._name_of))

    # ---------------------------------------------------------------- writing

    def _write_of(self, block: AnswerBlock, kind: str, **fields: Any) -> None:
        self._write(kind, item_id=block.id, output_index=block.index, **fields)

    def _write(self, kind: str, **fields: Any) -> None:
        self._written.append(written(kind, self._number, **fields))
        self._number += 1

    def _taken(self) -> str:
        written, self._written = "".join(self._written), []
        return written
