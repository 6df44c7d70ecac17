"""Decoding as pure functions: candidates in, continuations out.

Sampling and beam search return the same kinds of values, so the scheduler applies both in the same way. Beam search is
that of `transformers` (`generate` with num_beams, length_penalty, early_stopping and num_return_sequences); scores are
added in float32, as there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.interface.outputs import TokenLogprobs
from engine.interface.request import EarlyStopping
from engine.scheduling.plan import Float32, Int32

# Maximum number of candidates of all beams from which a device chooses before the host does.
MOST_AHEAD = 4096
_FLOAT32 = np.finfo(np.float32)


@dataclass(slots=True)  # a frozen one takes three times as long to make
class Continuation:
    """Sequence number `parent` of the group continues with `token`. Immutable by convention."""

    parent: int  # index among the given sequences
    token: int
    score: float  # the sequence's new accumulated log-probability
    column: int  # the column of the parent's candidates that contains the token


@dataclass(slots=True)
class Ranking:
    """The best candidates of all beams of a search, best first."""

    width: int
    # for each of the best candidates, the number of the beam that it continues, times width, plus its column among that
    # beam's
    places: list[int]
    tokens: list[int]
    scores: list[float]  # the beams' new accumulated log-probabilities

    def continuations(self, count: int) -> list[Continuation]:
        """The first `count` continuations."""
        width, best = self.width, zip(self.places[:count], self.tokens, self.scores, strict=False)
        return [Continuation(place // width, token, score, place % width) for place, token, score in best]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam."""

    token_ids: tuple[int, ...]  # its output, including the ending token
    score: float  # sum_logprob / len(token_ids) ** length_penalty
    sum_logprob: float  # accumulated processed log-probability
    by_length: bool  # whether it ended because max_tokens was reached
    logprobs: tuple[TokenLogprobs, ...] | None = field(default=None, compare=False)  # one entry per token, if asked for


@dataclass(frozen=True, slots=True)
class Ending:
    """A candidate that ends: which continuation it is, and how it is ranked."""

    continuation: Continuation
    score: float
    by_length: bool


@dataclass(slots=True)
class BeamStep:
    """The decisions of a step of beam search. Immutable by convention."""

    live: tuple[Continuation, ...]  # beams that continue, best first; empty when done
    endings: tuple[Ending, ...]  # candidates that ended and are good enough to be considered, best first
    done: bool  # whether the search is over once the endings are merged


def sample(
    scores: Sequence[float],
    tokens: Int32 | Sequence[Sequence[int]],
    logprobs: Float32 | Sequence[Sequence[float]],
    num_draws: int,
) -> list[Continuation]:
    """Each sequence is its own parent; a request's first sample may draw several tokens from one row.

    Args:
        scores: [B] accumulated log-probability of each sequence.
        tokens, logprobs: [B, C] drawn tokens.
        num_draws: how many columns count.
    """
    return [
        Continuation(parent, int(tokens[parent][draw]), score + float(logprobs[parent][draw]), draw)
        for parent, score in enumerate(scores)
        for draw in range(num_draws)
    ]


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The rules of a beam search."""

    num_beams: int  # live beams kept
    length_penalty: float  # exponent of the length by which a finished score is divided
    # True stops as soon as num_beams hypotheses are kept; False when the best live beam, at its current length, cannot
    # beat the worst kept one; "never" when it cannot at any length up to max_tokens
    early_stopping: EarlyStopping
    stop_ids: frozenset[int]
    max_tokens: int  # output length at which every beam ends
    distinct_ends: bool = False  # whether only the best of the stop tokens with which a beam may end counts

    @property
    def num_candidates(self) -> int:
        """The number of candidates each row must return so that num_beams unfinished ones are left."""
        return max(2, 1 + len(self.stop_ids)) * self.num_beams

    @property
    def may_run_ahead(self) -> bool:
        """Whether a device can itself choose the beams that continue: it looks at all candidates at once."""
        return self.num_beams * self.num_candidates <= MOST_AHEAD

    def advance(
        self,
        beam_scores: Sequence[float],
        length: int,
        kept: Sequence[Hypothesis],
        tokens: Int32,
        candidate_scores: Float32,
    ) -> BeamStep:
        """One step.

        Args:
            beam_scores: [B] accumulated scores of the live beams (one at the first step).
            length: output tokens of each live beam before this step.
            kept: finished hypotheses so far, best first, at most num_beams.
            tokens, candidate_scores: [B, K] each beam's best tokens and their processed log-probabilities.
        """
        (ranking,) = rank([beam_scores], tokens[None], candidate_scores[None], self.num_candidates)
        return self.choose(ranking, length, kept)

    def choose(self, ranking: Ranking, length: int, kept: Sequence[Hypothesis]) -> BeamStep:
        """Divide the best candidates into beams that continue and beams that end; the other arguments are those of
        `advance`."""
        at_limit = length + 1 >= self.max_tokens
        live: list[Continuation] = []
        endings: list[Ending] = []
        if not at_limit and self._all_go_on(ranking):  # as in most steps
            live = ranking.continuations(self.num_beams)
        else:
            for number, continuation in enumerate(self._considered(ranking)):
                score = continuation.score
                if score == -math.inf or (number >= self.num_beams and len(live) == self.num_beams):
                    break
                stops = continuation.token in self.stop_ids
                if stops or at_limit:
                    if number < self.num_beams:
                        endings.append(Ending(continuation, self.final_score(score, length + 1), not stops))
                elif len(live) < self.num_beams:
                    live.append(continuation)
        done = at_limit or not live or self._cannot_improve(live[0].score, length + 1, kept, endings)
        return BeamStep(() if done else tuple(live), tuple(endings), done)

    def final_score(self, sum_logprob: float, length: int) -> float:
        """The score of a hypothesis with this many output tokens."""
        with np.errstate(over="ignore"):
            return float(np.float32(sum_logprob) / _length_factor(length, self.length_penalty))

    def merge(self, kept: Sequence[Hypothesis], new: Sequence[Hypothesis]) -> list[Hypothesis]:
        """The best num_beams hypotheses; earlier ones come first if scores are equal."""
        return sorted([*kept, *new], key=lambda h: -h.score)[: self.num_beams]

    def _considered(self, ranking: Ranking) -> list[Continuation]:
        candidates = ranking.continuations(len(ranking.places))
        if not self.distinct_ends:
            return candidates
        ended: set[int] = set()
        kept = []
        for candidate in candidates:
            if candidate.token in self.stop_ids:
                if candidate.parent in ended:
                    continue
                ended.add(candidate.parent)
            kept.append(candidate)
        return kept

    def _all_go_on(self, ranking: Ranking) -> bool:
        """Whether the first candidates are all beams that the next step needs: possible, and not at their end."""
        last = self.num_beams - 1
        return (
            len(ranking.scores) > last
            and ranking.scores[last] > -math.inf
            and self.stop_ids.isdisjoint(ranking.tokens[: self.num_beams])
        )

    def _cannot_improve(
        self, best_live: float, length: int, kept: Sequence[Hypothesis], endings: Sequence[Ending]
    ) -> bool:
        if len(kept) + len(endings) < self.num_beams:
            return False
        if self.early_stopping is True:
            return True
        scores = sorted([*(h.score for h in kept), *(e.score for e in endings)], reverse=True)[: self.num_beams]
        longest = self.early_stopping == "never" and self.length_penalty > 0.0
        best_possible = self.final_score(best_live, self.max_tokens if longest else length)
        return not best_possible > scores[-1]


def rank(
    beam_scores: Sequence[Sequence[float]], tokens: Int32, candidate_scores: Float32, num_candidates: int
) -> list[Ranking]:
    """The num_candidates best of G searches, each with B live beams; one call of numpy serves all of them.

    Args:
        beam_scores: [G, B] accumulated scores of the live beams.
        tokens, candidate_scores: [G, B, K] each beam's best tokens and their processed log-probabilities; columns from
            num_candidates on are ignored.
    """
    tokens, candidate_scores = tokens[:, :, :num_candidates], candidate_scores[:, :, :num_candidates]
    count, _, width = tokens.shape
    totals = (candidate_scores + np.array(beam_scores, dtype=np.float32)[:, :, None]).reshape(count, -1)
    order = np.argsort(-totals, axis=1, kind="stable")[:, :num_candidates]
    searches = np.arange(count)[:, None]
    chosen, scores = tokens.reshape(count, -1)[searches, order], totals[searches, order]
    best = zip(order.tolist(), chosen.tolist(), scores.tolist(), strict=True)
    return [Ranking(width, *lists) for lists in best]


@functools.lru_cache(maxsize=4096)
def _length_factor(length: int, penalty: float) -> np.float32:
    """The divisor of a score. A penalty far from 0 exceeds the range of float32, which is no error and never gives 0 /
    0."""
    with np.errstate(over="ignore"):
        return np.float32(np.clip(np.float64(length) ** penalty, _FLOAT32.tiny, _FLOAT32.max))


def settled_lengths(live: Sequence[Sequence[int]], kept: Sequence[Sequence[int]], known: Sequence[int]) -> list[int]:
    """The number of output tokens of each answer that can no longer change.

    Answer i will be a hypothesis ranked at or above i now, or a continuation of a live beam: kept scores never change,
    so later hypotheses only push others down. The tokens that all of these have in common are settled.

    Args:
        kept: outputs of the kept hypotheses, best first.
        known: [n] lengths settled before; they only grow.
    """
    lengths = []
    for index, start in enumerate(known):
        group = [*live, *kept[: index + 1]]
        first = group[0]
        end = min(len(tokens) for tokens in group)
        position = start
        while position < end and all(tokens[position] == first[position] for tokens in group):
            position += 1
        lengths.append(position)
    return lengths
