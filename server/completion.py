"""Engine updates to OpenAI's completion choices.

Everything is made of pieces (`CompletionChoice` with the new text only): a stream sends them one by one,
an unstreamed answer joins them, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine import SamplingParams, TokenLogprobs
from engine.text import ChoiceText, Tokenizer
from server.generation import Prompt, Update
from server.schemas import CompletionChoice, CompletionLogprobs, PromptTokensDetails, Usage

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the choices are to look, as the request asked."""

    params: SamplingParams
    n: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    return_token_ids: bool = False


@dataclass(slots=True)
class _Progress:
    """Of one choice: whether its first piece was made, and where its text stands."""

    begun: bool = False
    offset: int = 0


@dataclass(slots=True)
class PieceMaker:
    """Makes the pieces of one request and adds up its usage.

    Choice indices are prompt * (answers per prompt) + answer, where params.n answers are generated.
    """

    prompts: Sequence[Prompt]
    shape: Shape
    tokenizer: Tokenizer | None
    completion_tokens: int = 0
    _cached: dict[int, int] = field(default_factory=dict)
    _progress: dict[int, _Progress] = field(default_factory=dict)

    def pieces(self, update: Update) -> list[CompletionChoice]:
        """The pieces worth sending; a piece without news is left out."""
        self._cached[update.prompt_index] = update.num_cached_tokens
        made = []
        for choice in update.choices:
            self.completion_tokens += len(choice.token_ids)
            piece = self._piece(update, choice)
            if piece.text or piece.finish_reason or piece.logprobs or piece.token_ids or piece.prompt_logprobs:
                made.append(piece)
        return made

    def usage(self) -> Usage:
        """The tokens so far."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )

    def _piece(self, update: Update, choice: ChoiceText) -> CompletionChoice:
        index = update.prompt_index * self.shape.params.n + choice.index
        progress = self._progress.setdefault(index, _Progress())
        prompt = self.prompts[update.prompt_index]
        first, progress.begun = not progress.begun, True
        piece = CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        if first and self.shape.echo:
            text = self._prompt_text(prompt)
            piece.text = text + piece.text
            if self.shape.logprobs is not None:
                self._add_prompt_logprobs(logprobs, prompt, text, update.prompt_logprobs)
            progress.offset = len(text)
        if self.shape.logprobs is not None and choice.logprobs is not None:
            self._add_logprobs(logprobs, progress, choice.token_ids, choice.logprobs)
        if logprobs.tokens:
            piece.logprobs = logprobs
        if self.shape.return_token_ids:
            piece.token_ids = list(choice.token_ids)
            if first:
                piece.prompt_token_ids = prompt.token_ids
        if first and self.shape.prompt_logprobs is not None and update.prompt_logprobs is not None:
            piece.prompt_logprobs = [self._full(entry) for entry in update.prompt_logprobs]
        return piece

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=self.shape.params.skip_special_tokens)

    def _token_text(self, token: int) -> str:
        return str(token) if self.tokenizer is None else self.tokenizer.token_text(token)

    def _add_logprobs(
        self, to: CompletionLogprobs, progress: _Progress, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]
    ) -> None:
        for token, entry in zip(token_ids, entries, strict=True):
            self._add_token(to, token, entry, progress.offset)
            progress.offset += 0 if self.tokenizer is None else len(self._token_text(token))

    def _add_prompt_logprobs(
        self,
        to: CompletionLogprobs,
        prompt: Prompt,
        text: str,
        entries: Sequence[TokenLogprobs | None] | None,
    ) -> None:
        cursor = 0
        for position, token in enumerate(prompt.token_ids):
            shown = self._token_text(token)
            # Some tokens do not stand in the text as they are: special ones, parts of characters, the
            # first with its space. They keep the place where the next one can begin.
            found = text.find(shown.lstrip() if position == 0 else shown, cursor, cursor + len(shown) + 8)
            cursor = max(cursor, found)
            self._add_token(to, token, entries[position] if entries else None, cursor)
            cursor += len(shown) if found >= 0 else 0

    def _add_token(self, to: CompletionLogprobs, token: int, entry: TokenLogprobs | None, offset: int) -> None:
        to.tokens.append(self._token_text(token))
        to.text_offset.append(offset)
        if entry is None:
            to.token_logprobs.append(None)
            to.top_logprobs.append(None)
            return
        limit = self.shape.logprobs or 0
        top: dict[str, float] = {}
        for position, (candidate, item) in enumerate(entry.items()):
            if position == 0 or item.rank is None or item.rank <= limit:
                top.setdefault(self._token_text(candidate), max(item.logprob, LOWEST_LOGPROB))
        to.token_logprobs.append(max(entry[token].logprob, LOWEST_LOGPROB))
        to.top_logprobs.append(top)

    def _full(self, entry: TokenLogprobs | None) -> dict[int, dict[str, float | int | str | None]] | None:
        if entry is None:
            return None
        limit = self.shape.prompt_logprobs or 0
        return {
            token: {
                "logprob": max(item.logprob, LOWEST_LOGPROB),
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for position, (token, item) in enumerate(entry.items())
            if position == 0 or item.rank is None or item.rank <= limit
        }


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
    if first.token_ids is not None:
        whole.token_ids = [token for piece in pieces for token in piece.token_ids or ()]
    return whole


def keep_best(
    choices: Sequence[CompletionChoice], scores: Sequence[float], generated: int, n: int
) -> list[CompletionChoice]:
    """Of every `generated` choices, the n with the highest scores, best first, renumbered."""
    kept = []
    for start in range(0, len(choices), generated):
        ranked = sorted(range(start, start + generated), key=lambda index: -scores[index])[:n]
        kept += [choices[index] for index in ranked]
    return [choice.model_copy(update={"index": index}) for index, choice in enumerate(kept)]
