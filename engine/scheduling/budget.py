"""The limit on a step's work that keeps it below a time limit.

The content of a step is counted as *work*, in tokens: a query-key pair and a row of logits count as the fraction of a
token that they took when the engine started (`Costs`). So a chunk late in a long prompt, which sees more keys, counts
more. Each of the last steps with prompts gives an estimate of the work that fits the wanted time. The next step may
hold the median of these. One slow step does not change that; if the machine becomes slower, the median follows after
three.

Nothing here decides what runs: the scheduler is given a `StepLimit` per step and keeps to it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np

from engine.interface.speculation import MOST_DRAFTS
from engine.scheduling.plan import Int32, StepPlan

# Share of the limit to aim at, which leaves room for the usual variation of a step's duration.
_AIM = 0.75
# Share of the limit that a step may take if it is as slow per token as the fastest of the last ones.
_MOST = 0.95
# Share of the limit that prompts get even if decoding rows take all of it.
_LEAST = 0.1
# Steps that are remembered.
_LAST = 5
# Tokens of a step until something was observed.
_FIRST = 16
# Multiple of the duration of a one-token step: if a step is shorter, the machine was busier when that was measured.
_SHORTER = 0.8
# Seconds; no step is shorter.
_SHORTEST = 1e-6
_NO_ROWS: Int32 = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Costs:
    """Work in tokens."""

    pair: float = 0.0  # work of one query for one key
    score: float = 0.0  # work of one row of logits
    # attention computes queries in tiles, cut at multiples of this many positions; half a tile takes as long as a whole
    # one
    tile: int = 1

    def work(self, start: int, count: int, scored: bool = False, beside: int = 0) -> float:
        """The work of a row: `count` tokens of one sequence from position `start` on.

        Args:
            scored: whether logits are wanted for every token, not only for the last one.
            beside: keys that each token sees besides the sequence's own: those of an encoder input.
        """
        return self.score + count * (1.0 + self.score * scored + self.pair * (start + beside + (count + 1) / 2))

    def encoding(self, count: int, scored: int = 0) -> float:
        """The work of an encoder input of `count` tokens, which all see each other. Logits are wanted for `scored` of
        them."""
        return count * (1.0 + self.pair * count) + self.score * scored

    def fits(self, work: float, start: int, scored: bool = False, beside: int = 0) -> int:
        """The maximum tokens from position `start` on that take no more than `work`, ending with a tile if they pass a
        tile's end; 2**31 if there is no limit."""
        if work <= 0.0 or work == math.inf:
            return 0 if work <= 0.0 else 2**31
        work = max(work - self.score, 0.0)
        linear = 1.0 + self.score * scored + self.pair * (start + beside + 0.5)
        # pair / 2 * count ** 2 + linear * count = work, solved so that pair may be 0.
        count = 2.0 * work / (linear + math.sqrt(linear**2 + 2.0 * self.pair * work))
        end = start + min(int(count), 2**31)
        whole = end - end % self.tile
        return (whole if whole > start else end) - start


@dataclass(frozen=True, slots=True)
class StepLimit:
    """The limit on a step's work."""

    costs: Costs = Costs()  # how work is counted
    tokens: int = 2**31  # maximum for all rows together. Decoding rows are never left out for this or for `work`.
    work: float = math.inf  # maximum for all rows together
    least: float = math.inf  # work allowed for prompts if the decoding rows leave less than this


UNLIMITED = StepLimit()


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step."""

    tokens: int
    prompt_tokens: int = 0  # the number of tokens in rows that do not just decode
    pairs: int = 0  # the number of query-key pairs
    scores: int = 0  # the number of rows of logits

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        sampled = _NO_ROWS if plan.sampling is None else plan.sampling.rows
        if plan.num_tokens == plan.num_rows == len(sampled) and plan.encoder is None and not plan.pooling:
            seen = plan.context_lens.tolist() if plan.cross is None else (plan.context_lens + plan.cross.lens).tolist()
            return cls(plan.num_tokens, 0, sum(seen), len(sampled))  # all rows decode: the simple case
        counts = np.diff(plan.query_start).astype(np.int64)
        pairs = counts * (plan.context_lens - counts) + (counts**2 if plan.unchunked else counts * (counts + 1) // 2)
        if plan.cross is not None:
            pairs += counts * plan.cross.lens
        encoded = np.diff(plan.encoder.starts).astype(np.int64) if plan.encoder is not None else counts[:0]
        # In a row that decodes, all positions are sampled.
        chosen = np.bincount(np.searchsorted(plan.query_start, sampled, side="right") - 1, minlength=len(counts))
        # After a wrong draft, a row with a state also has known tokens.
        again = 0 if plan.states is None else MOST_DRAFTS
        prompts = counts[(chosen < counts) & ((chosen == 0) | (counts - chosen > again))]
        scores = len(sampled) + (0 if plan.prompt_logprobs is None else len(plan.prompt_logprobs.rows))
        scores += sum(len(row.pooling.positions) for row in plan.pooling)
        whole = int(encoded.sum()) + round(plan.image_work)
        return cls(
            plan.num_tokens + whole, int(prompts.sum()) + whole, int(pairs.sum()) + int((encoded**2).sum()), scores
        )

    def total(self, costs: Costs) -> float:
        return self.tokens + costs.pair * self.pairs + costs.score * self.scores


class StepBudget:
    """Learns how long steps take, and limits the next one. Pure: it has no clock. `measured`: initial steps and their
    seconds."""

    def __init__(
        self, seconds: float, costs: Costs, measured: Iterable[tuple[StepWork, float]] = (), *, floor: float = 1.0
    ):
        self._seconds = seconds
        self._floor = floor  # work that a step may always have, however long it takes
        self._costs = costs  # how work is counted
        self._steps: deque[_Seen] = deque(maxlen=_LAST)  # with prompts
        self._single: deque[float] = deque(maxlen=_LAST)  # seconds of steps of one token
        for work, taken in measured:
            self.observe(work, taken)

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step with this work took this long."""
        if work.tokens <= 0 or not 0.0 < seconds < math.inf:
            return
        seconds = max(seconds, _SHORTEST)
        if work.tokens == 1:
            self._single.append(seconds)
        if work.prompt_tokens:
            self._steps.append(_Seen(work.tokens, work.total(self._costs), seconds))

    def limit(self) -> StepLimit:
        """The limit of the next step; a few tokens until something was observed."""
        if not self._steps:
            return StepLimit(self._costs, tokens=_FIRST, work=_FIRST, least=self._floor)
        limit, fixed = self._seconds, median(self._single) if self._single else 0.0
        if min(step.seconds for step in self._steps) < _SHORTER * fixed:
            fixed = 0.0
        if fixed < limit:
            aim = max(_AIM * limit, (fixed + limit) / 2)
        else:  # one token alone takes longer: then prompts need not be delayed as well
            limit, aim = 2.5 * fixed, 2.0 * fixed
        # Part of a step's time does not grow with it, so no step takes longer per token than a smaller one.
        limit *= _MOST
        most = limit * max(step.work / step.seconds for step in self._steps)
        return StepLimit(
            self._costs,
            tokens=math.ceil(limit * max(step.tokens / step.seconds for step in self._steps)),
            # Rounded up, so that the smallest chunk can grow.
            work=math.ceil(min(median(step.scaled(aim, fixed) for step in self._steps), most)),
            least=max(_LEAST * most, self._floor),
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """A step with prompts that was observed."""

    tokens: int
    work: float
    seconds: float

    def scaled(self, aim: float, fixed: float) -> float:
        """The work that would have taken `aim` seconds, if `fixed` of them do not grow with it."""
        # Not all of it: if `fixed` were too large, the smallest differences would have a large effect.
        fixed = min(fixed, 0.7 * self.seconds, 0.7 * aim)
        return self.work * (aim - fixed) / (self.seconds - fixed)
