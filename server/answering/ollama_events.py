"""An answer of /api/chat or /api/generate: whole, or as lines of JSON, in Ollama's shapes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import RootModel
from pydantic_core import to_json

from server.answering.answer import Run
from server.answering.blocks import AnswerBlock, AnswerBlocks
from server.answering.conversation import ConversationRun
from server.answering.events import Events
from server.answering.generation import Update
from server.answering.observation import RequestRecord
from server.answering.ollama_input import NAMES
from server.answering.pieces import PieceMaker
from server.answering.prompt import Prompt, Room
from server.answering.public_names import public_name, public_names
from server.answering.terms import DeadlineError
from server.answering.timings import timings_of
from server.api.chat_schemas import ChatPiece, ChatTokenLogprob
from server.api.ollama_schemas import OllamaCall
from server.api.schemas import Usage
from server.errors import ApiError

Line = dict[str, Any]

NDJSON = "application/x-ndjson"
_REASONS = {"stop": "stop", "tool_calls": "stop", "length": "length"}


def moment() -> str:
    """The time, in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def written(line: Line) -> str:
    return to_json(line).decode() + "\n"


@dataclass(frozen=True, slots=True)
class OllamaForm:
    """The form of an answer."""

    model: str  # the name that the client sent
    chat: bool  # whether the answer is a message, as in /api/chat; else it is a text, as in /api/generate
    context: bool = False  # whether the last line has the token ids of prompt and answer

    def part(self, text: str = "", thinking: str = "", calls: Sequence[OllamaCall] = ()) -> Line:
        """A line, or a whole answer without its end."""
        more: Line = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = list(calls)
        if self.chat:
            shown: Line = {"message": {"role": "assistant", "content": text, **more}}
        else:
            shown = {"response": text, **more}
        return {"model": self.model, "created_at": moment(), **shown, "done": False}

    def ended(self, reason: str) -> Line:
        """The answer to a request that loads or unloads the model."""
        return {**self.part(), "done": True, "done_reason": reason}


def ending(blocks: AnswerBlocks) -> Line:
    """The fields that say why the answer ended. Raises ApiError if the answer was cut off, by its deadline or by a
    failure."""
    reason = _REASONS.get(blocks.finish_reason or "")
    if reason is None:
        if blocks.stop_reason == "deadline":
            raise DeadlineError
        raise ApiError(
            500, "The server failed to complete this answer. See its log for the reason.", code="internal_error"
        )
    return {"done": True, "done_reason": reason}


def numbers(record: RequestRecord, usage: Usage) -> Line:
    """The tokens of a request and its durations, in nanoseconds."""
    times = timings_of(record)
    return {
        "total_duration": int((time.monotonic() - record.arrival) * 1e9),
        "load_duration": 0,  # the model was loaded before
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": int(times.prompt_ms * 1e6),
        "eval_count": usage.completion_tokens,
        "eval_duration": int(times.predicted_ms * 1e6),
    }


def call_of(block: AnswerBlock, index: int) -> OllamaCall:
    """A call in Ollama's shape. The arguments of a call that was cut off are empty."""
    try:
        arguments = json.loads(block.text)
    except (ValueError, RecursionError):  # a model may have written anything
        arguments = {}
    made: dict[str, Any] = arguments if isinstance(arguments, dict) else {}
    return {"id": block.call_id, "function": {"index": index, "name": block.name, "arguments": made}}


def _taken(piece: ChatPiece) -> tuple[list[ChatTokenLogprob], ChatPiece]:
    """The log-probabilities of a piece, and the piece without them."""
    if piece.logprobs is None:
        return [], piece
    return piece.logprobs.content, piece.model_copy(update={"logprobs": None})


def whole_of(
    form: OllamaForm, pieces: Sequence[ChatPiece], usage: Usage, record: RequestRecord, prompt: Prompt
) -> Line:
    """The body of an unstreamed answer. Raises ApiError if the answer was cut off."""
    blocks, logprobs, ids = AnswerBlocks(), list[ChatTokenLogprob](), list[int]()
    for piece in pieces:
        found, plain = _taken(piece)
        logprobs += found
        ids += piece.token_ids or ()
        blocks.feed(plain)
    blocks.finish()
    text, thinking = ("".join(block.text for block in blocks.made if block.kind == kind) for kind in _KINDS)
    calls = [block for block in blocks.made if block.kind == "call"]
    line = form.part(text, thinking, [call_of(block, index) for index, block in enumerate(calls)])
    line |= ending(blocks)
    if form.context:
        line["context"] = [*prompt.token_ids, *ids]
    if logprobs:
        line["logprobs"] = logprobs
    return line | numbers(record, usage)


_KINDS = ("text", "reasoning")


class OllamaEvents(Events[ChatPiece]):
    """Lines of a stream: parts of the answer, each call as a whole, then the numbers."""

    def __init__(self, maker: PieceMaker[ChatPiece], form: OllamaForm, record: RequestRecord):
        super().__init__(maker)
        self._form, self._record = form, record
        self._blocks = AnswerBlocks(self)
        self._lines: list[Line] = []
        self._ids: list[int] = []
        self._num_calls = 0

    @property
    def silence(self) -> str:  # type: ignore[override]  # the time is part of the line
        """A line without news, because lines cannot contain comments."""
        return written(self._form.part())

    def news(self, updates: Sequence[Update]) -> str:
        for update in updates:
            if self._form.context:
                self._ids += [token for choice in update.choices for token in choice.token_ids]
            for news in self.maker.news(update):
                if not isinstance(news, ChatPiece):
                    self._blocks.feed(news)
                    continue
                logprobs, piece = _taken(news)
                before = len(self._lines)
                self._blocks.feed(piece)
                if logprobs:
                    if len(self._lines) == before:
                        self._lines.append(self._form.part())
                    self._lines[-1]["logprobs"] = logprobs
        return self._taken()

    def closing(self) -> str:
        self._blocks.finish()
        last = self._taken()
        try:
            line = self._form.part() | ending(self._blocks)
        except ApiError as problem:
            return last + self.failing(problem)
        if self._form.context:
            line["context"] = [*self.maker.prompts[0].token_ids, *self._ids]
        return last + written(line | numbers(self._record, self.maker.usage()))

    def failing(self, problem: ApiError) -> str:
        return failure(problem)

    # ---------------------------------------------------------------- what the blocks tell

    def began(self, block: AnswerBlock) -> None:
        """Do nothing: the beginning of a block has no line of its own."""

    def grew(self, block: AnswerBlock, text: str, logprobs: Sequence[ChatTokenLogprob]) -> None:
        if text and block.kind != "call":
            says = block.kind == "text"
            self._lines.append(self._form.part(text if says else "", "" if says else text))

    def ended(self, block: AnswerBlock) -> None:
        if block.kind == "call":
            self._lines.append(self._form.part(calls=[call_of(block, self._num_calls)]))
            self._num_calls += 1

    def _taken(self) -> str:
        taken, self._lines = "".join(map(written, self._lines)), []
        return taken


def failure(problem: ApiError) -> str:
    return written({"error": problem.message})


@dataclass(slots=True)
class OllamaRun(ConversationRun[ChatPiece]):
    """A conversation, answered in Ollama's shape. `before`: token ids before the prompt: those of an earlier answer's
    `context`."""

    id_prefix = "ollama-"
    stream_type = NDJSON
    form: OllamaForm = field(kw_only=True)
    before: list[int] = field(default_factory=list, kw_only=True)
    asked: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        Run.__post_init__(self)
        if self.form.context and not self.body.stream:
            self.shape = replace(self.shape, return_token_ids=True)

    async def prompts(self) -> list[Prompt]:
        with public_names(NAMES):
            self.asked = await ConversationRun.prompts(self)
        return self.asked

    async def rendered(self, room: Room) -> Prompt:
        prompt = await ConversationRun.rendered(self, room)
        if not self.before:
            return prompt
        own = prompt.token_ids
        bos = None if self.service.tokenizer is None else self.service.tokenizer.bos_token_id
        return replace(prompt, token_ids=[*self.before, *(own[1:] if own[:1] == [bos] else own)])

    def join(self, pieces: list[ChatPiece]) -> list[ChatPiece]:
        return pieces

    def whole(self, choices: list[ChatPiece], usage: Usage) -> RootModel[Line]:
        return RootModel[Line].model_construct(whole_of(self.form, choices, usage, self.record, self.asked[0]))

    def events(self, maker: PieceMaker[ChatPiece]) -> OllamaEvents:
        return OllamaEvents(maker, self.form, self.record)

    def failing(self, problem: ApiError) -> str:
        return failure(problem)

    def public_name(self, param: str | None) -> str | None:
        return public_name(param, NAMES)
