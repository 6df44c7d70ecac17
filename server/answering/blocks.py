"""An answer as a sequence of blocks: text, reasoning, function calls.

/v1/responses and /v1/messages use blocks; they are made from the pieces of a chat answer. Log-probabilities exist only
for answers that are plain text.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from server.answering.pieces import PlainText
from server.api.chat_schemas import CallDelta, ChatPiece, ChatTokenLogprob

Kind = Literal["text", "reasoning", "call"]
_ID_PREFIXES: dict[Kind, str] = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


@dataclass(slots=True)
class AnswerBlock:
    """A part of an answer."""

    kind: Kind
    index: int  # the block's index in the answer
    id: str
    call_id: str = ""  # for a call, the id that its result refers to
    name: str = ""
    parts: list[str] = field(default_factory=list)  # the parts of the text, or of a call's arguments
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)  # log-probabilities of a text's tokens, if requested
    ended: bool = False  # whether the block is finished
    complete: bool = False  # whether it was not cut off

    @property
    def text(self) -> str:
        """The text, or a call's arguments, so far."""
        if len(self.parts) > 1:
            self.parts = ["".join(self.parts)]
        return self.parts[0] if self.parts else ""


class BlockListener(Protocol):
    """A listener that is told when blocks begin and grow."""

    def began(self, block: AnswerBlock) -> None:
        """A new, empty block has begun; all others have ended."""

    def grew(self, block: AnswerBlock, text: str, logprobs: Sequence[ChatTokenLogprob]) -> None:
        """The block has more text, which may be empty if there are log-probabilities."""

    def ended(self, block: AnswerBlock) -> None:
        """The block has ended."""


class AnswerBlocks:
    """The blocks of one answer. `listener`: is notified at once."""

    def __init__(self, listener: BlockListener | None = None):
        self._listener = listener
        self.made: list[AnswerBlock] = []
        self.finish_reason: str | None = None  # as in chat answers; None until known
        self.stop_reason: int | str | None = None  # the stop string or token that ended the answer

    def feed(self, news: ChatPiece | PlainText) -> None:
        """Add a part of the answer."""
        if isinstance(news, PlainText):
            self._grow(self._current("text"), news.text)
            return
        delta = news.delta
        if delta.reasoning_content:
            self._grow(self._current("reasoning"), delta.reasoning_content)
        logprobs = news.logprobs.content if news.logprobs is not None else ()
        if delta.content or logprobs:
            self._grow(self._current("text"), delta.content or "", logprobs)
        for call in delta.tool_calls or ():
            self._call(call)
        if news.finish_reason is not None:
            self.finish_reason, self.stop_reason = news.finish_reason, news.stop_reason

    def finish(self) -> None:
        """End the answer; an answer without blocks becomes an empty text."""
        complete = self.finish_reason in ("stop", "tool_calls")
        if not self.made and complete:
            self._begin("text")
        self._end(complete)

    @property
    def _open(self) -> AnswerBlock | None:
        return self.made[-1] if self.made and not self.made[-1].ended else None

    def _current(self, kind: Kind) -> AnswerBlock:
        block = self._open
        return block if block is not None and block.kind == kind else self._begin(kind)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> AnswerBlock:
        self._end(complete=True)
        block = AnswerBlock(kind, len(self.made), f"{_ID_PREFIXES[kind]}{uuid.uuid4().hex}", call_id, name)
        self.made.append(block)
        if self._listener is not None:
            self._listener.began(block)
        return block

    def _grow(self, block: AnswerBlock, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> None:
        block.parts.append(text)
        block.logprobs += logprobs
        if self._listener is not None:
            self._listener.grew(block, text, logprobs)

    def _call(self, call: CallDelta) -> None:
        block = self._open
        if call.id is not None or block is None or block.kind != "call":
            block = self._begin("call", call.id or f"call_{uuid.uuid4().hex}", call.function.name or "")
        if call.function.arguments:
            self._grow(block, call.function.arguments)

    def _end(self, complete: bool) -> None:
        block = self._open
        if block is not None:
            block.ended, block.complete = True, complete
            if self._listener is not None:
                self._listener.ended(block)
