"""Turns a step's candidates into changed sequences and a delta for the caller.

These are helpers of the `Scheduler`, which owns the sequences: they fork and append, and the scheduler handles pages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np

from engine.interface.constraints import Failing
from engine.interface.outputs import (
    BeamMove,
    BeamMoves,
    ChoiceDelta,
    FinishReason,
    Logprob,
    Pooled,
    RequestDelta,
    TokenLogprobs,
)
from engine.scheduling.plan import Float32, Int32, PooledRow, SamplingBatch, StepResult
from engine.scheduling.row import Row
from engine.scheduling.search import (
    BeamSearch,
    BeamStep,
    Continuation,
    Ending,
    Hypothesis,
    Ranking,
    rank,
    sample,
    settled_lengths,
)
from engine.scheduling.sequence import Sequence, SequenceGroup

# Score of an answer for which no continuation was left.
_UNREACHABLE = -1e9
_NO_ROWS: Mapping[int, int] = {}


@dataclass(slots=True)
class Outcome:
    """The result for a group."""

    delta: RequestDelta  # the news for the caller
    live: list[Sequence]
    # (child, parent) pairs; the child needs references to the parent's pages
    forks: list[tuple[Sequence, Sequence]] = field(default_factory=list)
    # sequences that have ended; their pages are freed after all forks
    dropped: list[Sequence] = field(default_factory=list)
    num_new_tokens: int = 0  # number of tokens that the caller gained


class Answer:
    """A step's result in the form in which it is read: drawn tokens one by one, and candidates of all searches ranked
    together.

    Args:
        sampled: the groups that were sampled, with the first row of the result of each of their sequences.
        accepted: for sequences with several rows, how many of them count, by their first rows.
    """

    __slots__ = ("accepted", "failed", "logprobs", "rankings", "result", "tokens")

    def __init__(
        self, result: StepResult, sampled: Mapping[SequenceGroup, Seq[int]], accepted: Mapping[int, int] = _NO_ROWS
    ):
        self.result = result
        self.accepted = accepted
        draws = any(group.beam is None for group in sampled)
        # tokens, logprobs: as in the result, as lists; empty if all groups search
        self.tokens: list[list[int]] = result.tokens.tolist() if draws else []
        self.logprobs: list[list[float]] = result.logprobs.tolist() if draws else []
        # drawn rows without a token
        self.failed = {row for row, found in enumerate(self.logprobs) if math.isnan(found[0])}
        # the ranking of each group that searches; None if a score is not a number
        self.rankings: dict[SequenceGroup, Ranking | None] = {}
        alike: dict[tuple[int, int], list[tuple[SequenceGroup, Seq[int]]]] = {}
        for group, places in sampled.items():
            if group.beam is not None:
                alike.setdefault((len(places), group.beam.num_candidates), []).append((group, places))
        for (_, num_candidates), searches in alike.items():
            rows = np.array([places for _, places in searches])
            scores = result.scores[rows]
            beam_scores = [[sequence.score for sequence in group.sequences] for group, _ in searches]
            rankings = rank(beam_scores, result.tokens[rows], scores, num_candidates)
            for (group, _), ranking, best in zip(searches, rankings, scores[:, :, 0].tolist(), strict=True):
                self.rankings[group] = None if any(map(math.isnan, best)) else ranking


def accepted_rows(batch: SamplingBatch | None, result: StepResult) -> Mapping[int, int]:
    """The number of rows of a result that count for each sequence, by its first row; empty if each has one."""
    if batch is None or batch.spans is None or result.accepted is None:
        return _NO_ROWS
    return dict(zip(batch.spans[:-1].tolist(), result.accepted.tolist(), strict=True))


def apply_candidates(group: SequenceGroup, answer: Answer, rows: Seq[int], prompt_logprobs_complete: bool) -> Outcome:
    """Let the search decide on these rows of the answer, the first row of each sequence of the group."""
    ranking, first = answer.rankings.get(group), rows[0]
    if ranking is None and (group.beam is not None or not answer.failed.isdisjoint(rows)):
        # The sampler says NaN for both.
        message = _problem(group) or (
            "no token is possible: the model's output is not a number (NaN), or every token is banned"
        )
        return Outcome(final_abort(group, "error", message), [], dropped=list(group.sequences))
    prompt_logprobs = group.prompt_logprobs if prompt_logprobs_complete else None
    if prompt_logprobs is not None and any(map(_is_nan, prompt_logprobs)):
        message = "the prompt cannot be scored: the model's output is not a number (NaN)"
        return Outcome(final_abort(group, "error", message), [], dropped=list(group.sequences))
    if group.beam is not None and ranking is not None:
        outcome = _apply_beams(group, group.beam, ranking, answer, first)
    elif group.started or group.request.decoding.n == 1:
        outcome = _apply_samples(group, answer, rows)
    else:
        outcome = _apply_draws(group, answer, first)
    if prompt_logprobs is not None or not group.started:
        outcome.delta = replace(
            outcome.delta,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=group.num_cached_tokens,
            scheduled_time=group.scheduled_time,
            first_token_time=None if group.started else time.monotonic(),
        )
    return outcome


def _problem(group: SequenceGroup) -> str | None:
    """The reason why a constraint of the group allows no more tokens, or None."""
    for sequence in group.sequences:
        constraint = sequence.constraint
        if constraint is not None and isinstance(constraint, Failing) and constraint.problem is not None:
            return constraint.problem
    return None


def apply_pooled(group: SequenceGroup, row: Row, answer: PooledRow) -> Outcome | None:
    """Keep the result of a part of an input, or end the group with the answer; None if more is to come."""
    if row.start + row.count < row.sequence.num_tokens:
        group.pooled = np.asarray(answer.values, dtype=np.float64)
        return None
    if not np.isfinite(answer.values).all():
        message = "the model's output is not a finite number"
        return Outcome(final_abort(group, "error", message), [], dropped=list(group.sequences))
    delta = RequestDelta(
        request_id=group.request.request_id,
        choices=(),
        finished=True,
        num_cached_tokens=group.num_cached_tokens,
        pooled=Pooled.of(answer.values.astype(np.float32), answer.ids),
        scheduled_time=group.scheduled_time,
        first_token_time=time.monotonic(),
    )
    return Outcome(delta, [], dropped=list(group.sequences))


def _is_nan(entry: TokenLogprobs | None) -> bool:
    return entry is not None and any(math.isnan(scored.logprob) for scored in entry.values())


def final_abort(group: SequenceGroup, reason: FinishReason, message: str) -> RequestDelta:
    """The last delta of a group that ends early."""
    indices: Iterable[int]
    if group.request.pooling is not None:
        indices = ()  # there are no answers that could say how they ended
    elif group.beam is not None or not group.started:
        indices = range(group.request.decoding.n)
    else:
        indices = [sequence.index for sequence in group.sequences]
    return RequestDelta(
        request_id=group.request.request_id,
        choices=[ChoiceDelta(index=i, token_ids=(), finish_reason=reason, stop_reason=message) for i in indices],
        finished=True,
        num_cached_tokens=group.num_cached_tokens,
        error=message if reason == "error" or group.request.pooling is not None else None,
        scheduled_time=group.scheduled_time,
    )


def take_prompt_logprobs(rows: Seq[Row], result: StepResult) -> set[SequenceGroup]:
    """Store the step's prompt log-probabilities; returns the groups whose list is now complete. Those of void rows are
    skipped."""
    scores = result.prompt_logprobs
    complete: set[SequenceGroup] = set()
    position = 0
    for row in rows:
        number = row.group.request.decoding.prompt_logprobs
        if number is None or row.group.started:
            continue
        if row.is_void:
            position += len(row.scored)
            continue
        for place in row.scored:
            assert scores is not None
            entry = _entry(
                row.sequence.tokens[place + 1],
                float(scores.logprobs[position]),
                int(scores.ranks[position]),
                scores.top_ids[position, :number],
                scores.top_logprobs[position, :number],
            )
            row.group.prompt_logprobs.append(entry)
            position += 1
        if row.sampled:
            complete.add(row.group)
    return complete


def _entry(token: int, logprob: float, rank: int, top_ids: Int32, top_logprobs: Float32) -> TokenLogprobs:
    entry = {token: Logprob(logprob, rank)}
    for place, (other, value) in enumerate(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True), start=1):
        entry.setdefault(other, Logprob(value, place))
    return entry


def _token_logprobs(group: SequenceGroup, answer: Answer, row: int, column: int) -> TokenLogprobs | None:
    number = group.request.decoding.logprobs
    if number is None:
        return None
    result = answer.result
    entry = _entry(
        int(result.tokens[row, column]),
        float(result.logprobs[row, column]),
        int(result.ranks[row, column]),
        result.top_ids[row, :number],
        result.top_logprobs[row, :number],
    )
    if result.watched is not None:
        for token, value in zip(group.request.decoding.logprob_token_ids, result.watched[row].tolist(), strict=False):
            entry.setdefault(token, Logprob(value))
    return entry


def _stop_reason(group: SequenceGroup, token: int) -> int | None:
    return None if token in group.request.decoding.eos_ids else token


def _apply_samples(group: SequenceGroup, answer: Answer, rows: Seq[int]) -> Outcome:
    """Each sequence continues with the token that was drawn for it, or ends."""
    choices: list[ChoiceDelta] = []
    live: list[Sequence] = []
    dropped: list[Sequence] = []
    accepted = answer.accepted
    for row, sequence in zip(rows, group.sequences, strict=True):
        choice = _go_on(group, sequence, answer, row)
        if accepted:
            news, end = [choice], row + accepted[row]
            while news[-1].finish_reason is None and row + len(news) < end:
                news.append(_go_on(group, sequence, answer, row + len(news)))
            choice = _joined(news)
        choices.append(choice)
        (live if choice.finish_reason is None else dropped).append(sequence)
    delta = RequestDelta(request_id=group.request.request_id, choices=choices, finished=not live)
    count = sum([len(choice.token_ids) for choice in choices]) if accepted else len(choices)
    return Outcome(delta, live, [], dropped, count)


def _go_on(group: SequenceGroup, sequence: Sequence, answer: Answer, row: int) -> ChoiceDelta:
    """The news of a sequence that continues with the token drawn in a row, or ends with it."""
    token, score = answer.tokens[row][0], sequence.score + answer.logprobs[row][0]
    choice = _choice(group, sequence, token, score, _token_logprobs(group, answer, row, 0))
    if choice.finish_reason is None:
        sequence.append(group.request.decoding, token)
        sequence.score = score
    return choice


def _joined(news: Seq[ChoiceDelta]) -> ChoiceDelta:
    if len(news) == 1:
        return news[0]
    return replace(
        news[-1],
        token_ids=tuple(token for choice in news for token in choice.token_ids),
        logprobs=None if news[0].logprobs is None else tuple(e for choice in news for e in choice.logprobs or ()),
        sums=tuple(choice.cumulative_logprob for choice in news),
    )


def _apply_draws(group: SequenceGroup, answer: Answer, first: int) -> Outcome:
    """A request's first sample draws one token for each of its answers."""
    (parent,) = group.sequences
    drawn = sample(
        [parent.score], answer.tokens[first : first + 1], answer.logprobs[first : first + 1], group.request.decoding.n
    )
    choices = [
        _choice(group, parent, c.token, c.score, _token_logprobs(group, answer, first, c.column), c.column)
        for c in drawn
    ]
    going = [c for c, choice in zip(drawn, choices, strict=True) if choice.finish_reason is None]
    live, forks, dropped = _extend(group, [parent], going)
    for sequence, continuation in zip(live, going, strict=True):
        sequence.index = continuation.column  # the number of the answer
    delta = RequestDelta(request_id=group.request.request_id, choices=choices, finished=not live)
    return Outcome(delta, live, forks, dropped, len(choices))


def _choice(
    group: SequenceGroup, parent: Sequence, token: int, score: float, entry: TokenLogprobs | None, column: int = 0
) -> ChoiceDelta:
    decoding = group.request.decoding
    reason: FinishReason | None = None
    if token in decoding.stop_ids:
        reason = "stop"
    elif parent.tokens.size - parent.num_prompt + 1 >= decoding.max_tokens:
        reason = "length"
    return ChoiceDelta(
        index=parent.index + column,
        token_ids=(token,),
        logprobs=None if entry is None else (entry,),
        finish_reason=reason,
        stop_reason=_stop_reason(group, token) if reason == "stop" else None,
        cumulative_logprob=score,
    )


def _extend(
    group: SequenceGroup, parents: Seq[Sequence], continuations: Seq[Continuation]
) -> tuple[list[Sequence], list[tuple[Sequence, Sequence]], list[Sequence]]:
    """The sequences of the continuations, in order; the forks, as pairs; and the sequences that end. Each parent's
    first child inherits its sequence and pages. The other children fork, into sequences of childless parents if there
    are any.
    """
    numbers = [continuation.parent for continuation in continuations]
    heirs: set[int] = set()
    forks: list[tuple[Sequence, Sequence]] = []
    spare = [parent for number, parent in enumerate(parents) if number not in numbers]
    live: list[Sequence] = []
    for number in numbers:
        sequence = parent = parents[number]
        if number in heirs:
            sequence = spare.pop() if spare else Sequence(parent.index, (), with_logprobs=False)
            sequence.follow(parent)
            forks.append((sequence, parent))
        heirs.add(number)
        live.append(sequence)
    for sequence, continuation in zip(live, continuations, strict=True):
        sequence.append(group.request.decoding, continuation.token)
        sequence.score = continuation.score
    return live, forks, spare


def _apply_beams(group: SequenceGroup, beam: BeamSearch, ranking: Ranking, answer: Answer, first: int) -> Outcome:
    parents = group.sequences
    step = beam.choose(ranking, parents[0].num_output, group.kept)
    if step.endings:
        group.kept = beam.merge(group.kept, [_hypothesis(group, answer, first, ending) for ending in step.endings])
    if step.done and not group.kept:
        message = _problem(group) or "no token is possible: every token is banned for all beams"
        delta = final_abort(group, "error", message)
        return Outcome(delta, [], dropped=list(parents))
    live, forks, dropped = _extend(group, parents, step.live)
    for place, sequence in enumerate(live):
        sequence.index = place
        if sequence.logprobs is not None:
            continuation = step.live[place]
            entry = _token_logprobs(group, answer, first + continuation.parent, continuation.column)
            sequence.logprobs += [] if entry is None else [entry]
    choices = _finished_beams(group) if step.done else _settled_beams(group, live)
    beams = _moves(step) if group.request.decoding.stream_beams else None
    delta = RequestDelta(request_id=group.request.request_id, choices=choices, finished=step.done, beams=beams)
    return Outcome(delta, live, forks, dropped, sum([len(choice.token_ids) for choice in choices]))


def _moves(step: BeamStep) -> BeamMoves:
    ended = [BeamMove(e.continuation.parent, e.continuation.token, e.score) for e in step.endings]
    return BeamMoves([BeamMove(c.parent, c.token, c.score) for c in step.live], ended)


def _hypothesis(group: SequenceGroup, answer: Answer, first: int, ending: Ending) -> Hypothesis:
    continuation = ending.continuation
    parent = group.sequences[continuation.parent]
    entry = _token_logprobs(group, answer, first + continuation.parent, continuation.column)
    return Hypothesis(
        token_ids=(*parent.output(), continuation.token),
        score=ending.score,
        sum_logprob=continuation.score,
        by_length=ending.by_length,
        logprobs=None if entry is None or parent.logprobs is None else (*parent.logprobs, entry),
    )


def _settled_beams(group: SequenceGroup, live: Seq[Sequence]) -> list[ChoiceDelta]:
    """Tokens that became certain: see `settled_lengths`."""
    base = min(group.settled)
    start = live[0].num_prompt + base
    token = live[0].tokens[start]
    if any(sequence.tokens[start] != token for sequence in live[1:]):
        return []  # they differ before anything is settled, as in most steps
    outputs = [sequence.tokens.view(start).tolist() for sequence in live]
    kept = [hypothesis.token_ids[base:] for hypothesis in group.kept]
    lengths = settled_lengths(outputs, kept, [known - base for known in group.settled])
    choices = []
    for index, length in enumerate(lengths):
        known, end = group.settled[index], base + length
        if end > known:
            logprobs = live[0].logprobs
            choices.append(
                ChoiceDelta(
                    index=index,
                    token_ids=tuple(outputs[0][known - base : length]),
                    logprobs=None if logprobs is None else tuple(logprobs[known:end]),
                )
            )
            group.settled[index] = end
    return choices


def _finished_beams(group: SequenceGroup) -> list[ChoiceDelta]:
    choices = []
    number = group.request.decoding.n
    # If bans or forced tokens leave fewer continuations than answers, the best is repeated, as in transformers.
    missing = [replace(group.kept[0], score=_UNREACHABLE)] * (number - len(group.kept))
    for index, hypothesis in enumerate([*group.kept[:number], *missing]):
        known = group.settled[index]
        choices.append(
            ChoiceDelta(
                index=index,
                token_ids=hypothesis.token_ids[known:],
                logprobs=None if hypothesis.logprobs is None else hypothesis.logprobs[known:],
                finish_reason="length" if hypothesis.by_length else "stop",
                stop_reason=None if hypothesis.by_length else _stop_reason(group, hypothesis.token_ids[-1]),
                cumulative_logprob=hypothesis.sum_logprob,
                score=hypothesis.score,
            )
        )
    return choices
