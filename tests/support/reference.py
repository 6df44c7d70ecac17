"""The reference: `transformers.generate`, together with how clear each of its decisions was.

A margin is the smallest difference of scores that decided anything: between the best two tokens of a
greedy step; for beams between the last live beam and the next candidate, around the rank up to which
endings count, in the test for stopping early, and between finished beams that are kept, ordered or lost.
Where margins exceed the rounding differences of two implementations, their answers must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

MIN_MARGIN = 1e-4


def skip_if_older(differs: bool = True) -> None:
    """End a test whose reference is what transformers computes otherwise before 5.23: searches where an encoder's
    tokens count or are of a vocabulary of their own, and forbidden words of several tokens."""
    version = transformers.__version__
    if differs and tuple(map(int, version.split(".")[:2])) < (5, 23):
        pytest.skip(f"transformers {version} computes this otherwise")


@dataclass(frozen=True)
class Answer:
    """A reference answer; `score` only for beams."""

    tokens: list[int]
    score: float | None = None


@dataclass(frozen=True)
class Reference:
    """Answers, best first, and the smallest margin of all steps."""

    answers: list[Answer]
    margin: float


def greedy(
    model: Any,
    prompt: Sequence[int],
    eos: Sequence[int] | None,
    max_tokens: int,
    *,
    begin: Sequence[int] | None = None,
    **settings: Any,
) -> Reference:
    """Greedy decoding by the reference; `begin` are the first tokens of an encoder-decoder model's decoder."""
    watch = _Greedy()
    output = _generate(model, prompt, eos, max_tokens, watch, begin, num_beams=1, **settings)
    return Reference([Answer(_trim(output.sequences[0], len(begin or prompt), eos))], watch.margin)


def beams(
    model: Any,
    prompt: Sequence[int],
    eos: Sequence[int] | None,
    max_tokens: int,
    *,
    num_beams: int,
    n: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    begin: Sequence[int] | None = None,
    **settings: Any,
) -> Reference:
    """Beam search by the reference; `begin` as for `greedy`."""
    watch = _Beams(len(begin or prompt), num_beams, frozenset(eos or ()), max_tokens, length_penalty, early_stopping)
    output = _generate(
        model,
        prompt,
        eos,
        max_tokens,
        watch,
        begin,
        num_beams=num_beams,
        num_return_sequences=n,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        output_scores=True,
        **settings,
    )
    answers = [
        Answer(_trim(tokens, len(begin or prompt), eos), float(score))
        for tokens, score in zip(output.sequences, output.sequences_scores, strict=True)
    ]
    margin = watch.finish(n)
    # The margins are those of this very search only if the observer kept the same beams.
    for seen, answer in zip(watch.kept_scores, answers, strict=False):
        assert math.isclose(seen, answer.score or 0.0, rel_tol=1e-5, abs_tol=1e-4), (watch.kept_scores, answers)
    return Reference(answers, margin)


@torch.no_grad()
def logprobs(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """log_softmax of the reference's logits after each token, [len(tokens), vocabulary]."""
    return model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(dim=-1)


def _generate(
    model: Any,
    prompt: Sequence[int] | torch.Tensor,
    eos: Sequence[int] | None,
    max_tokens: int,
    watch: Any,
    begin: Sequence[int] | None,
    **settings: Any,
) -> Any:
    ids = prompt if isinstance(prompt, torch.Tensor) else torch.tensor([list(prompt)])
    if begin is not None:
        settings |= {"decoder_input_ids": torch.tensor([list(begin)]), "decoder_start_token_id": begin[0]}
    processors = [*settings.pop("processors", ()), watch]
    if not ids.is_floating_point():
        settings["attention_mask"] = torch.ones_like(ids)
    previous = model.generation_config
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    try:
        return model.generate(
            ids,
            do_sample=False,
            eos_token_id=list(eos) if eos else None,
            max_new_tokens=max_tokens,
            return_dict_in_generate=True,
            logits_processor=transformers.LogitsProcessorList(processors),
            **settings,
        )
    finally:
        model.generation_config = previous


def _trim(sequence: torch.Tensor, start: int, eos: Sequence[int] | None) -> list[int]:
    tokens = sequence[start:].tolist()
    for place, token in enumerate(tokens):
        if token in (eos or ()):
            return tokens[: place + 1]
    return tokens


class OpenAIPenalties(transformers.LogitsProcessor):
    """presence_penalty and frequency_penalty of OpenAI's API reference, which `transformers` lacks."""

    def __init__(self, num_prompt: int, presence: float, frequency: float) -> None:
        self.num_prompt, self.presence, self.frequency = num_prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, tokens in enumerate(input_ids.tolist()):
            output = tokens[self.num_prompt :]
            for token in set(output):
                scores[row, token] -= self.presence + self.frequency * output.count(token)
        return scores


class _Greedy(transformers.LogitsProcessor):
    """Runs after all other processors and changes nothing."""

    def __init__(self) -> None:
        self.margin = math.inf

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        first, second = scores[0].topk(2).values.tolist()
        self.margin = min(self.margin, first - second)
        return scores


class _Beams(transformers.LogitsProcessor):
    """Runs after all other processors, changes nothing, and follows the search's decisions."""

    def __init__(
        self,
        num_prompt: int,
        num_beams: int,
        stop_ids: frozenset[int],
        max_tokens: int,
        length_penalty: float,
        early_stopping: bool | str,
    ) -> None:
        self.num_prompt, self.num_beams, self.stop_ids = num_prompt, num_beams, stop_ids
        self.max_tokens, self.length_penalty, self.early_stopping = max_tokens, length_penalty, early_stopping
        self.margin = math.inf
        self.kept_scores: list[float] = []
        self._totals: dict[tuple[int, ...], float] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1] - self.num_prompt
        if length == 0:
            self._totals = {tuple(input_ids[0].tolist()): 0.0}
        rows: dict[tuple[int, ...], int] = {}
        for row, tokens in enumerate(input_ids.tolist()):
            rows.setdefault(tuple(tokens), row)
        candidates: list[tuple[float, tuple[int, ...]]] = []
        width = min((len(self.stop_ids) + 2) * self.num_beams + 2, scores.shape[1])
        for tokens, row in rows.items():
            total = self._totals.get(tokens)
            if total is None:
                continue  # a beam that only fills a place, at a score of -1e9
            best = scores[row].topk(width)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if value > -math.inf:
                    candidates.append((total + value, (*tokens, token)))
        candidates.sort(key=lambda c: -c[0])
        self._decide(candidates, length + 1)
        return scores

    def _decide(self, candidates: list[tuple[float, tuple[int, ...]]], length: int) -> None:
        count, at_limit = self.num_beams, length >= self.max_tokens
        ends = [at_limit or tokens[-1] in self.stop_ids for _, tokens in candidates]
        live = [c for c, end in zip(candidates, ends, strict=True) if not end]
        if len(live) > count:
            self._note(live[count - 1][0], live[count][0])
        if len(candidates) > count:
            for place, (score, _) in enumerate(candidates[: 3 * count]):
                if ends[place]:
                    self._note(score, candidates[count if place < count else count - 1][0])
        endings = [s / length**self.length_penalty for (s, _), end in zip(candidates, ends, strict=True) if end]
        counted = sum(ends[:count])
        merged = sorted([*self.kept_scores, *endings[:counted]], reverse=True)
        if len(merged) > count:
            self._note(merged[count - 1], merged[count])
        self.kept_scores = merged[:count]
        self._totals = {tokens: score for score, tokens in live[:count]}
        if live and len(self.kept_scores) == count and self.early_stopping is not True:
            longest = self.early_stopping == "never" and self.length_penalty > 0
            possible = live[0][0] / (self.max_tokens if longest else length) ** self.length_penalty
            self._note(possible, self.kept_scores[-1])

    def finish(self, n: int) -> float:
        """The smallest margin, the order of the n answers included."""
        for place in range(min(n, len(self.kept_scores) - 1)):
            self._note(self.kept_scores[place], self.kept_scores[place + 1])
        return self.margin

    def _note(self, one: float, other: float) -> None:
        self.margin = min(self.margin, abs(one - other))
