"""Answers with the choices of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine import TokenLogprobs
from engine.text.processor import ChoiceText
from server.answering.answer import Run
from server.answering.generation import BYTES_PER_LOGPROB, Update
from server.answering.pieces import LOWEST_LOGPROB, PieceMaker, PlainText
from server.answering.prompt import Prompt
from server.api.schemas import CompletionChoice, CompletionLogprobs


@dataclass(slots=True)
class CompletionPieces(PieceMaker[CompletionChoice]):
    """Pieces that are choices with only the new text."""

    _offsets: dict[int, int] = field(default_factory=dict)  # current text offset of each choice

    def make(self, update: Update, choice: ChoiceText, index: int, first: bool) -> list[CompletionChoice]:
        """The choice's piece, unless it is empty."""
        prompt = self.prompts[update.prompt_index]
        extras = self.prompt_fields(update) if first else {}
        if self.shape.return_token_ids:
            extras["token_ids"] = list(choice.token_ids)
        piece = CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            **extras,
        )
        if choice.score is not None:
            piece.score = max(choice.score, LOWEST_LOGPROB)
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if first and self.shape.echo:
            text = self._prompt_text(prompt)
            piece.text = text + piece.text
            if self.shape.logprobs is not None:
                self._add_prompt_logprobs(logprobs, prompt, text, update.prompt_logprobs)
            self._offsets[index] = len(text)
        if self.shape.logprobs is not None and choice.logprobs is not None:
            self._add_logprobs(logprobs, index, choice.token_ids, choice.logprobs)
        if logprobs.tokens:
            piece.logprobs = logprobs
        news = piece.text or piece.finish_reason or piece.logprobs or piece.token_ids or piece.prompt_logprobs
        return [piece] if news else []

    def plain(self, news: PlainText) -> CompletionChoice:
        """The piece with only this text."""
        return CompletionChoice(index=news.index, text=news.text, logprobs=None, finish_reason=None, stop_reason=None)

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=self.shape.params.skip_special_tokens)

    def _add_logprobs(
        self, to: CompletionLogprobs, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> None:
        offset = self._offsets.get(index, 0)
        for token, entry in zip(token_ids, entries, strict=True):
            self._add_token(to, token, entry, offset)
            offset += 0 if self.tokenizer is None else len(self.token_text(token))
        self._offsets[index] = offset

    def _add_prompt_logprobs(
        self, to: CompletionLogprobs, prompt: Prompt, text: str, entries: Sequence[TokenLogprobs | None] | None
    ) -> None:
        cursor = 0
        for position, token in enumerate(prompt.token_ids):
            shown = self.token_text(token)
            # Some tokens do not appear in the text unchanged: special ones, parts of characters, the first one with its
            # space. Their offset is where the next one can begin.
            found = text.find(shown.lstrip() if position == 0 else shown, cursor, cursor + len(shown) + 8)
            cursor = max(cursor, found)
            self._add_token(to, token, entries[position] if entries else None, cursor)
            cursor += len(shown) if found >= 0 else 0

    def _add_token(self, to: CompletionLogprobs, token: int, entry: TokenLogprobs | None, offset: int) -> None:
        to.tokens.append(self.label(token))
        to.text_offset.append(offset)
        if entry is None:
            to.token_logprobs.append(None)
            to.top_logprobs.append(None)
            return
        limit = self.shape.logprobs or 0
        top: dict[str, float] = {}
        for position, (candidate, item) in enumerate(entry.items()):
            if position == 0 or item.rank is None or item.rank <= limit:
                top.setdefault(self.label(candidate), max(item.logprob, LOWEST_LOGPROB))
        to.token_logprobs.append(max(entry[token].logprob, LOWEST_LOGPROB))
        to.top_logprobs.append(top)


class TextRun(Run[CompletionChoice, CompletionChoice]):
    """Answers whose choices are those of /v1/completions, or are derived from them."""

    bytes_per_logprob = BYTES_PER_LOGPROB

    def maker(self, prompts: list[Prompt]) -> CompletionPieces:
        return CompletionPieces(prompts, self.shape, self.service.tokenizer)

    def join(self, pieces: list[CompletionChoice]) -> list[CompletionChoice]:
        return join(pieces)


def join(pieces: Iterable[CompletionChoice]) -> list[CompletionChoice]:
    """Whole choices, in the order of their index."""
    parts: dict[int, list[CompletionChoice]] = {}
    for piece in pieces:
        parts.setdefault(piece.index, []).append(piece)
    return [_join_one(parts[index]) for index in sorted(parts)]


def _join_one(pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    first, last = pieces[0], pieces[-1]
    whole = first.model_copy(update={"text": "".join(piece.text for piece in pieces)})
    whole.finish_reason, whole.stop_reason = last.finish_reason, last.stop_reason
    logprobs = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    if logprobs:
        whole.logprobs = CompletionLogprobs(
            tokens=[item for part in logprobs for item in part.tokens],
            token_logprobs=[item for part in logprobs for item in part.token_logprobs],
            top_logprobs=[item for part in logprobs for item in part.top_logprobs],
            text_offset=[item for part in logprobs for item in part.text_offset],
        )
    if last.score is not None:
        whole.score = last.score
    # vLLM's clients expect these fields in each answer, null if not requested.
    asked = first.token_ids is not None
    whole.token_ids = [token for piece in pieces for token in piece.token_ids or ()] if asked else None
    whole.prompt_token_ids, whole.prompt_logprobs = first.prompt_token_ids, first.prompt_logprobs
    return whole
