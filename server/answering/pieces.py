"""Turns engine updates into pieces of an answer, for any endpoint's shape.

A piece holds only new text. A stream sends pieces one by one and an unstreamed answer joins them, so the two cannot
differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from engine import SamplingParams, TokenLogprobs
from engine.text.processor import ChoiceText, Tokenizer
from server.answering.generation import Update
from server.answering.prompt import Prompt
from server.api.schemas import BeamMove, BeamStep, CompletionTokensDetails, LiveBeams, PromptTokensDetails, Usage

LOWEST_LOGPROB = -9999.0  # minus infinity, which JSON cannot express

Piece = TypeVar("Piece", bound=BaseModel)
Choice = TypeVar("Choice", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerShape:
    """The requested form of the choices. With `prompt_only`, the answer is not shown; with `tokens_as_ids`,
    log-probabilities name tokens by their ids; `timings` come at the end of the answer, or with each event of a
    stream."""

    params: SamplingParams
    n: int
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    prompt_only: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    timings: Literal["end", "each"] | None = None

    @property
    def text_only(self) -> bool:
        """Whether most of a stream's updates may be plain text."""
        return self.logprobs is None and not self.return_token_ids and self.timings != "each"


@dataclass(slots=True)
class PlainText:
    """An update of a choice that is only text, as most of a stream is."""

    index: int
    text: str


@dataclass(slots=True)
class PieceMaker(ABC, Generic[Piece]):
    """Makes the pieces of one request and counts its usage.

    A choice's index is prompt * (answers per prompt) + answer; params.n answers are generated.
    """

    prompts: Sequence[Prompt]
    shape: AnswerShape
    tokenizer: Tokenizer | None
    completion_tokens: int = 0
    _cached: dict[int, int] = field(default_factory=dict)
    _drafted: dict[int, tuple[int, int]] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)

    @abstractmethod
    def make(self, update: Update, choice: ChoiceText, index: int, first: bool) -> list[Piece]:
        """The pieces worth sending for one choice's update; `first` marks the choice's first update."""

    @abstractmethod
    def plain(self, news: PlainText) -> Piece:
        """The piece with only this text."""

    def pieces(self, update: Update) -> list[Piece]:
        """The pieces worth sending."""
        made = (self.make(update, choice, index, first) for choice, index, first in self._choices(update))
        return [piece for pieces in made for piece in pieces]

    def news(self, update: Update) -> list[Piece | PlainText]:
        """The pieces of `pieces`, except that plain text stays a `PlainText`."""
        made: list[Piece | PlainText] = []
        for choice, index, first in self._choices(update):
            if first or choice.finish_reason is not None or not self.shape.text_only:
                made += self.make(update, choice, index, first)
            elif choice.text:
                made.append(PlainText(index, choice.text))
        return made

    def _choices(self, update: Update) -> Iterator[tuple[ChoiceText, int, bool]]:
        """The choices with updates, with their index in the whole request, and whether the update is their first."""
        self._cached[update.prompt_index] = update.num_cached_tokens
        self._drafted[update.prompt_index] = update.num_draft_tokens, update.num_accepted_draft_tokens
        for choice in map(_nothing_of, update.choices) if self.shape.prompt_only else update.choices:
            self.completion_tokens += len(choice.token_ids)
            index = update.prompt_index * self.shape.params.n + choice.index
            first = index not in self._begun
            self._begun.add(index)
            yield choice, index, first

    def beams(self, update: Update) -> LiveBeams | None:
        """The update's data about beams, if any."""
        if not update.beams:
            return None
        steps = [BeamStep(live=self._moves(step.live), ended=self._moves(step.ended)) for step in update.beams]
        return LiveBeams(prompt=update.prompt_index, steps=steps)

    def _moves(self, moves: Sequence[tuple[int, int, float]]) -> list[BeamMove]:
        return [
            BeamMove(parent=parent, token=self.token_text(token), score=max(score, LOWEST_LOGPROB))
            for parent, token, score in moves
        ]

    def usage(self) -> Usage:
        """The tokens so far."""
        prompt_tokens = sum(prompt.num_tokens for prompt in self.prompts)
        usage = Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )
        if self.shape.params.predicted_token_ids is not None:
            drafted = sum(drafted for drafted, _ in self._drafted.values())
            accepted = sum(accepted for _, accepted in self._drafted.values())
            usage.completion_tokens_details = CompletionTokensDetails(
                accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
            )
        return usage

    def prompt_fields(self, update: Update) -> dict[str, Any]:
        """The facts about the prompt in a choice's first piece, if requested."""
        fields: dict[str, Any] = {}
        if self.shape.return_token_ids:
            fields["prompt_token_ids"] = self.prompts[update.prompt_index].token_ids
        if self.shape.prompt_logprobs is not None and update.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [self._full(entry) for entry in update.prompt_logprobs]
        return fields

    def opens(self, piece: Piece | PlainText) -> bool:
        """Whether it comes before the first token of its choice."""
        return False

    def label(self, token: int) -> str:
        """The token's name in log-probabilities."""
        return f"token_id:{token}" if self.shape.tokens_as_ids else self.token_text(token)

    def token_text(self, token: int) -> str:
        """The token's text; without a tokenizer, its number."""
        return str(token) if self.tokenizer is None else self.tokenizer.token_text(token)

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


def _nothing_of(choice: ChoiceText) -> ChoiceText:
    finish_reason = choice.finish_reason
    if finish_reason == "stop":  # for a token that was not requested
        finish_reason = "length"
    return ChoiceText(index=choice.index, token_ids=[], finish_reason=finish_reason)


def keep_best(choices: Sequence[Choice], scores: Sequence[float], generated: int, n: int) -> list[Choice]:
    """The n best-scored of every `generated` choices, best first, renumbered."""
    kept = []
    for start in range(0, len(choices), generated):
        ranked = sorted(range(start, start + generated), key=lambda index: -scores[index])[:n]
        kept += [choices[index] for index in ranked]
    return [choice.model_copy(update={"index": index}) for index, choice in enumerate(kept)]
