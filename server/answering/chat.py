"""Chat messages in, and engine updates to the choices of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from engine import Logprob, TokenLogprobs
from engine.text.processor import ChoiceText
from server.answering.generation import Update
from server.answering.pieces import LOWEST_LOGPROB, PieceMaker, PlainText
from server.api.chat_schemas import (
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatPiece,
    ChatTokenLogprob,
    TopLogprob,
)
from server.errors import ApiError, shown

ROLES = ("system", "developer", "user", "assistant")
# Fields of a message that would change the prompt and are not supported.
_UNSUPPORTED = ("tool_calls", "tool_call_id", "function_call", "audio")


def read_messages(given: Sequence[Any]) -> list[dict[str, str]]:
    """Messages as templates want them: role and content as text, and name where there is one.

    Text parts are joined with line breaks, since most templates know no parts.

    Raises:
        ApiError: names the first thing that is wrong.
    """
    if not given:
        _fail("messages", "messages must hold at least one message, got an empty list.")
    return [_read_message(item, f"messages[{index}]") for index, item in enumerate(given)]


def _read_message(item: Any, where: str) -> dict[str, str]:
    if not isinstance(item, dict):
        _fail(where, f"{where} must be an object with role and content, got {shown(item)}.")
    role = item.get("role")
    if role not in ROLES:
        _fail(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}.")
    for unsupported in _UNSUPPORTED:
        if item.get(unsupported):
            reason = f"{where}.{unsupported} is not supported; leave it out."
            _fail(f"{where}.{unsupported}", reason, code="unsupported_parameter")
    message: dict[str, str] = {"role": role, "content": _read_content(item.get("content"), f"{where}.content")}
    name = item.get("name")
    if name is not None:
        if not isinstance(name, str):
            _fail(f"{where}.name", f"{where}.name must be a string, got {shown(name)}.")
        message["name"] = name
    return message


def _read_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        _fail(where, f"{where} must be a string or a non-empty list of text parts, got {shown(content)}.")
    return "\n".join(_read_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _read_part(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        _fail(where, f'{where} must be an object such as {{"type": "text", "text": "..."}}, got {shown(part)}.')
    kind = part.get("type")
    if kind != "text":
        message = f"{where}.type is {shown(kind)}, which is not supported; only 'text' parts are."
        _fail(f"{where}.type", message, code="unsupported_parameter")
    text = part.get("text")
    if not isinstance(text, str):
        _fail(f"{where}.text", f"{where}.text must be a string, got {shown(text)}.")
    return text


def _fail(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    raise ApiError(400, message, param=param, code=code)


@dataclass(slots=True)
class ChatPieces(PieceMaker[ChatPiece]):
    """A piece with the role opens each choice; text follows."""

    _bytes: dict[int, list[int] | None] = field(default_factory=dict)  # of tokens that were told

    def make(self, update: Update, choice: ChoiceText, index: int, first: bool) -> list[ChatPiece]:
        """The choice's piece, unless it says nothing, and the opening before the first."""
        made = []
        if first:
            opening = ChatDelta(role="assistant", content="")
            fields = self.prompt_fields(update)
            made.append(ChatPiece(index=index, delta=opening, logprobs=None, finish_reason=None, **fields))
        logprobs = None
        if self.shape.logprobs is not None and choice.logprobs:
            content = [self._describe(*pair) for pair in zip(choice.token_ids, choice.logprobs, strict=True)]
            logprobs = ChatLogprobs.model_construct(content=content, refusal=None)  # no copy, no validation
        shows_ids = self.shape.return_token_ids and choice.token_ids
        if choice.text or choice.finish_reason or logprobs or shows_ids:
            delta = ChatDelta(content=choice.text)
            piece = ChatPiece(index=index, delta=delta, logprobs=logprobs, finish_reason=choice.finish_reason)
            if choice.finish_reason is not None:
                piece.stop_reason = choice.stop_reason
            if self.shape.return_token_ids:
                piece.token_ids = list(choice.token_ids)
            made.append(piece)
        return made

    def plain(self, news: PlainText) -> ChatPiece:
        """The piece that says no more than this."""
        return ChatPiece(index=news.index, delta=ChatDelta(content=news.text), logprobs=None, finish_reason=None)

    def _describe(self, token: int, entry: TokenLogprobs) -> ChatTokenLogprob:
        chosen = self._candidate(token, entry[token])
        ranked = sorted(entry.items(), key=lambda pair: -pair[1].logprob)
        top = [pair for pair in ranked if pair[1].rank is not None and pair[1].rank <= (self.shape.logprobs or 0)]
        return ChatTokenLogprob(**chosen, top_logprobs=[self._candidate(*pair) for pair in top])

    def _candidate(self, token: int, item: Logprob) -> TopLogprob:
        if token not in self._bytes:
            found = None if self.tokenizer is None else self.tokenizer.token_bytes(token)
            self._bytes[token] = None if found is None else list(found)
        return TopLogprob(
            token=self.token_text(token), logprob=max(item.logprob, LOWEST_LOGPROB), bytes=self._bytes[token]
        )


def join_pieces(pieces: Iterable[ChatPiece], *, logprobs: bool) -> list[ChatChoice]:
    """Whole choices, in the order of their index."""
    parts: dict[int, list[ChatPiece]] = {}
    for piece in pieces:
        parts.setdefault(piece.index, []).append(piece)
    return [_join_one(parts[index], logprobs=logprobs) for index in sorted(parts)]


def _join_one(pieces: Sequence[ChatPiece], *, logprobs: bool) -> ChatChoice:
    first, last = pieces[0], pieces[-1]
    text = "".join(piece.delta.content for piece in pieces)
    tokens = [entry for piece in pieces if piece.logprobs is not None for entry in piece.logprobs.content]
    whole = ChatChoice(
        index=first.index,
        message=ChatMessage(role="assistant", content=text, refusal=None),
        logprobs=ChatLogprobs.model_construct(content=tokens, refusal=None) if logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        **first.model_dump(include={"prompt_token_ids", "prompt_logprobs"}, exclude_unset=True),
    )
    if last.token_ids is not None:
        whole.token_ids = [token for piece in pieces for token in piece.token_ids or ()]
    return whole
