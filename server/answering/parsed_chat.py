"""Choices of /v1/chat/completions whose reasoning and calls are separated from their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.text.processor import ChoiceText
from server.answering.chat import ChatPieces
from server.answering.generation import Update
from server.answering.parsing import AnswerParser, Parsing
from server.answering.parts import CallPart, Part, Reasoning, TextPart
from server.answering.pieces import PieceMaker, PlainText
from server.api.chat_schemas import CallDelta, ChatDelta, ChatPiece, FunctionDelta
from server.api.schemas import CompletionTokensDetails, Usage


@dataclass(slots=True)
class _Choice:
    """One answer: its parser, and the number of its reasoning tokens so far, if it has any."""

    parser: AnswerParser
    reasoning_tokens: int = 0
    thinks: bool = True  # reasoning may still continue


@dataclass(slots=True)
class ParsedChatPieces(ChatPieces):
    """The pieces of parsed answers."""

    parsing: Parsing = field(kw_only=True)
    _choices_read: dict[int, _Choice] = field(default_factory=dict)

    def news(self, update: Update) -> list[ChatPiece | PlainText]:
        """The pieces worth sending; plain text is not made into pieces."""
        made: list[ChatPiece | PlainText] = []
        for choice, index, first in self._choices(update):
            parts = self._read(choice, index)
            match parts:
                case [TextPart(text)] if self._is_plain and not first and choice.finish_reason is None:
                    made.append(PlainText(index, text))
                case _:
                    made += self._made(update, choice, index, first, parts)
        return made

    def make(self, update: Update, choice: ChoiceText, index: int, first: bool) -> list[ChatPiece]:
        """The choice's pieces, one for each run of text, reasoning or calls, after the opening if they are the
        first."""
        return self._made(update, choice, index, first, self._read(choice, index))

    def usage(self) -> Usage:
        """The tokens so far, with reasoning counted separately."""
        usage = PieceMaker.usage(self)
        if self.parsing.reasoning_ends_with is not None:
            read = self._choices_read.values()
            tokens = sum(choice.reasoning_tokens for choice in read if choice.parser.reasoned)
            details = usage.completion_tokens_details or CompletionTokensDetails()
            details.reasoning_tokens = tokens
            usage.completion_tokens_details = details
        return usage

    @property
    def _is_plain(self) -> bool:
        return self.shape.text_only

    def _read(self, choice: ChoiceText, index: int) -> list[Part]:
        read = self._choices_read.get(index)
        if read is None:
            read = self._choices_read[index] = _Choice(AnswerParser(self.parsing))
        parts = read.parser.feed(choice.text) if choice.text else []
        if choice.finish_reason is not None:
            parts += read.parser.finish()
        if read.thinks and self.parsing.reasoning_ends_with is not None:
            self._count(read, choice)
        return parts

    def _count(self, read: _Choice, choice: ChoiceText) -> None:
        for token in choice.token_ids:
            read.reasoning_tokens += 1
            if token == self.parsing.reasoning_ends_with:
                read.thinks = False
                break

    def _made(
        self, update: Update, choice: ChoiceText, index: int, first: bool, parts: Sequence[Part]
    ) -> list[ChatPiece]:
        opening = self.opening(update, index) if first else []
        made = [ChatPiece(index=index, delta=delta, logprobs=None, finish_reason=None) for delta in _deltas(parts)]
        logprobs = self.describe(choice)
        shows_ids = self.shape.return_token_ids and choice.token_ids
        if not made and (choice.finish_reason or logprobs or shows_ids):
            made.append(ChatPiece(index=index, delta=ChatDelta(), logprobs=None, finish_reason=None))
        if made:
            made[0].logprobs = logprobs
            if self.shape.return_token_ids:
                made[0].token_ids = list(choice.token_ids)
                for piece in made[1:]:
                    piece.token_ids = []
        if choice.finish_reason is not None:
            called = self._choices_read[index].parser.called and choice.finish_reason == "stop"
            made[-1].finish_reason = "tool_calls" if called else choice.finish_reason
            made[-1].stop_reason = choice.stop_reason
        return opening + made


def _deltas(parts: Sequence[Part]) -> list[ChatDelta]:
    """The deltas of parts in a stream; successive calls share a delta."""
    deltas: list[ChatDelta] = []
    for part in parts:
        if isinstance(part, TextPart):
            deltas.append(ChatDelta(content=part.text))
        elif isinstance(part, Reasoning):
            deltas.append(ChatDelta(reasoning_content=part.text, reasoning=part.text))
        else:
            _add_call(deltas, part)
    return deltas


def _add_call(deltas: list[ChatDelta], part: CallPart) -> None:
    last = deltas[-1].tool_calls if deltas else None
    if part.id is None:
        news = CallDelta(index=part.index, function=FunctionDelta(arguments=part.arguments))
        if last and last[-1].index == part.index:
            last[-1].function.arguments += part.arguments
            return
    else:
        function = FunctionDelta(name=part.name, arguments=part.arguments)
        news = CallDelta(index=part.index, id=part.id, type="function", function=function)
    if last is None:
        deltas.append(ChatDelta(tool_calls=[news]))
    else:
        last.append(news)
