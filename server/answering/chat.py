"""Engine updates to the choices of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine import Logprob, TokenLogprobs
from engine.text.processor import ChoiceText
from server.answering.generation import Update
from server.answering.pieces import LOWEST_LOGPROB, PieceMaker, PlainText
from server.api.chat_schemas import (
    ChatCall,
    ChatChoice,
    ChatDelta,
    ChatFunction,
    ChatLogprobs,
    ChatMessage,
    ChatPiece,
    ChatTokenLogprob,
    PromptFields,
    TopLogprob,
)


@dataclass(slots=True)
class ChatPieces(PieceMaker[ChatPiece]):
    """The first piece of each choice has the role; text follows. `role`: the role of the answer's message."""

    role: str = "assistant"
    echoed: str = ""
    _told: bool = False  # facts about the prompt, if requested
    _bytes: dict[int, list[int] | None] = field(default_factory=dict)  # number of reported tokens

    def make(self, update: Update, choice: ChoiceText, index: int, first: bool) -> list[ChatPiece]:
        """The choice's piece, unless it is empty, after the opening if it is the first."""
        made = self.opening(update, index) if first else []
        logprobs = self.describe(choice)
        shows_ids = self.shape.return_token_ids and choice.token_ids
        if choice.text or choice.finish_reason or logprobs or shows_ids:
            delta = ChatDelta(content=choice.text)
            piece = ChatPiece(index=index, delta=delta, logprobs=logprobs, finish_reason=choice.finish_reason)
            if choice.finish_reason is not None:
                piece.stop_reason = choice.stop_reason
            if choice.score is not None:
                piece.score = max(choice.score, LOWEST_LOGPROB)
            if self.shape.return_token_ids:
                piece.token_ids = list(choice.token_ids)
            made.append(piece)
        return made

    def opening(self, update: Update, index: int) -> list[ChatPiece]:
        """The deltas before a choice's first text: the role, and the echo."""
        delta = ChatDelta(role=self.role, content="")
        piece = ChatPiece(index=index, delta=delta, logprobs=None, finish_reason=None)
        if not self._told:
            piece.prompt, self._told = PromptFields(**self.prompt_fields(update)), True
        made = [piece]
        if self.echoed:
            made.append(self.plain(PlainText(index, self.echoed)))
        return made

    def describe(self, choice: ChoiceText) -> ChatLogprobs | None:
        """The log-probabilities of the choice's new tokens, if asked for."""
        if self.shape.logprobs is None or not choice.logprobs:
            return None
        content = [self._describe(*pair) for pair in zip(choice.token_ids, choice.logprobs, strict=True)]
        return ChatLogprobs.model_construct(content=content, refusal=None)  # no copy, no validation

    def opens(self, piece: ChatPiece | PlainText) -> bool:
        """Whether it comes before the choice's first token."""
        return isinstance(piece, ChatPiece) and piece.delta.role is not None

    def plain(self, news: PlainText) -> ChatPiece:
        """The piece with only this text."""
        return ChatPiece(index=news.index, delta=ChatDelta(content=news.text), logprobs=None, finish_reason=None)

    def _describe(self, token: int, entry: TokenLogprobs) -> ChatTokenLogprob:
        chosen = self._candidate(token, entry[token])
        ranked = sorted(entry.items(), key=lambda pair: -pair[1].logprob)
        most, listed = self.shape.logprobs or 0, self.shape.params.logprob_token_ids or ()
        top = [pair for pair in ranked if pair[0] in listed or (pair[1].rank is not None and pair[1].rank <= most)]
        return ChatTokenLogprob(**chosen, top_logprobs=[self._candidate(*pair) for pair in top])

    def _candidate(self, token: int, item: Logprob) -> TopLogprob:
        if token not in self._bytes:
            found = None if self.tokenizer is None else self.tokenizer.token_bytes(token)
            self._bytes[token] = None if found is None else list(found)
        return TopLogprob(token=self.label(token), logprob=max(item.logprob, LOWEST_LOGPROB), bytes=self._bytes[token])


def join_pieces(pieces: Iterable[ChatPiece], *, logprobs: bool) -> list[ChatChoice]:
    """Whole choices, in the order of their index."""
    parts: dict[int, list[ChatPiece]] = {}
    for piece in pieces:
        parts.setdefault(piece.index, []).append(piece)
    return [_join_one(parts[index], logprobs=logprobs) for index in sorted(parts)]


def _join_one(pieces: Sequence[ChatPiece], *, logprobs: bool) -> ChatChoice:
    last = pieces[-1]
    tokens = [entry for piece in pieces if piece.logprobs is not None for entry in piece.logprobs.content]
    whole = ChatChoice(
        index=pieces[0].index,
        message=_join_message([piece.delta for piece in pieces]),
        logprobs=ChatLogprobs.model_construct(content=tokens, refusal=None) if logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        token_ids=None,
    )
    if last.score is not None:
        whole.score = last.score
    if last.token_ids is not None:
        whole.token_ids = [token for piece in pieces for token in piece.token_ids or ()]
    return whole


def _join_message(deltas: Sequence[ChatDelta]) -> ChatMessage:
    text = "".join(delta.content or "" for delta in deltas)
    message = ChatMessage(role=deltas[0].role or "assistant", content=text, refusal=None, annotations=[])
    if any(delta.reasoning_content is not None for delta in deltas):
        message.reasoning_content = "".join(delta.reasoning_content or "" for delta in deltas)
        message.reasoning = message.reasoning_content
    calls: dict[int, ChatCall] = {}
    arguments: dict[int, list[str]] = {}
    for news in (news for delta in deltas for news in delta.tool_calls or ()):
        if news.id is not None:
            function = ChatFunction(name=news.function.name or "", arguments="")
            calls[news.index] = ChatCall(id=news.id, type="function", function=function)
        arguments.setdefault(news.index, []).append(news.function.arguments)
    for index, call in calls.items():
        call.function.arguments = "".join(arguments[index])
    if calls:
        message.tool_calls = list(calls.values())
        message.content = text or None
    return message
