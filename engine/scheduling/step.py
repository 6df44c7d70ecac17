"""A step that is being planned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.scheduling.block_pool import PageHash
from engine.scheduling.budget import UNLIMITED, StepLimit
from engine.scheduling.draft_costs import DraftGain
from engine.scheduling.encoder_input import EncoderInput
from engine.scheduling.row import Row
from engine.scheduling.sequence import SequenceGroup

# Share of a step that prompts of background requests get while clients come and go.
_BACKGROUND = 1 / 16


@dataclass(slots=True)
class EncoderRun:
    """A run of the encoder in a step."""

    groups: list[SequenceGroup] = field(default_factory=list)  # the step's requests with this input; at least one
    done: bool = False  # whether another part of the same step has run it

    @property
    def encoder_input(self) -> EncoderInput:
        """The input, and where its K and V are stored."""
        encoder_input = self.groups[0].encoder_input
        assert encoder_input is not None
        return encoder_input


@dataclass(slots=True)
class SearchAhead:
    """Rows of a beam search that are planned before it is known which beams continue."""

    # one for each beam. Their sequences are those of the beams before that, until the answer says which they are.
    rows: list[Row]
    pages: list[int]  # the page set aside for each row; 0 for none. Pages that turn out to be unnecessary are returned.


@dataclass(slots=True)
class NextStep:
    """The work of each group in a step, the pages to copy for it, and the remaining room."""

    budget: int  # number of tokens that may still be planned
    limit: StepLimit = UNLIMITED  # how long the step may take
    left: float = math.inf  # work (see `StepLimit`) that may still be planned; counted since prompts are planned
    num_prompts: int | None = None  # number of groups planned since prompts are planned; None before
    rows: dict[SequenceGroup, list[Row]] = field(default_factory=dict)
    copies: dict[SequenceGroup, list[tuple[int, int]]] = field(default_factory=dict)
    # runs of the encoder, by the key of their input
    encoder_runs: dict[PageHash, EncoderRun] = field(default_factory=dict)
    # the beam searches among the groups whose last answer is not known
    searches: dict[SequenceGroup, SearchAhead] = field(default_factory=dict)
    preempted: bool = False
    clients_only: bool = False  # whether background requests are left out
    ahead: bool = False  # whether another step is in flight, so that nothing is preempted for this one
    num_drafts: int = 0  # number of tokens that may still be drafted: none once prompts are planned
    gain: DraftGain = field(default_factory=lambda: DraftGain(None, 0))
    kept_pages: int = 0  # number of pages that running groups still lack for their tokens, if tokens are drafted
    image_work: float = 0.0  # the work of making vectors of images, in tokens

    def begin_prompts(self) -> None:
        """Begin to plan prompts, after all decoding rows have their token. Prompts get at least their minimum."""
        self.num_prompts = self.num_drafts = 0
        work = self.limit.work - sum(self._work(group, rows) for group, rows in self.rows.items())
        self.left = max(work, self.limit.least)
        taken = sum(row.count for rows in self.rows.values() for row in rows)
        self.budget = int(min(self.budget, max(self.limit.tokens - taken, self.limit.least, 1)))

    def halve(self) -> None:
        """Plan at most half of the work that is left."""
        self.left /= 2

    def shorten(self, rows: int) -> None:
        """Limit the step, so that a client's request does not wait long for its end. `rows`: the rows of the first
        request; with fewer tokens than rows, it would get none."""
        self.left *= _BACKGROUND
        self.budget = min(self.budget, max(int(self.budget * _BACKGROUND), rows))

    @contextmanager
    def half(self) -> Iterator[None]:
        """A context in which only half of the remaining room is planned. The next prompt after it counts as the step's
        first."""
        budget, work = self.budget // 2, self.left / 2 if self.left < math.inf else 0.0
        kept = self.budget - budget
        self.budget, self.left = budget, self.left - work
        try:
            yield
        finally:
            self.budget, self.left, self.num_prompts = self.budget + kept, self.left + work, 0

    @property
    def is_open(self) -> bool:
        """Whether another prompt may have tokens; the first one always may."""
        return self.budget > 0 and (self.left >= 1.0 or not self.num_prompts)

    def room(self, group: SequenceGroup) -> int:
        """The number of tokens that a prompt may have now: at least one while the step is open."""
        fits = self.limit.costs.fits(self.left, group.sequences[0].num_scheduled, _scores(group), _beside(group))
        return min(max(fits, int(self.is_open)), self.budget)

    def can_read(self, group: SequenceGroup) -> bool:
        """Whether the group's input, which is read whole, may run now: it fits, or is the first prompt of this step."""
        count = group.sequences[0].num_tokens
        return not self.num_prompts or (count <= self.budget and self._reading(group, count) <= self.left)

    def see(self, work: float) -> bool:
        """Make vectors of an image, if that fits beside what is planned; the first prompt's first image always does."""
        if work > self.left and (self.num_prompts or self.image_work):
            return False
        self.left -= work
        self.image_work += work
        return True

    def take(self, group: SequenceGroup, rows: list[Row]) -> None:
        """Plan these rows of the group."""
        self.rows[group] = rows
        self.budget -= sum([row.count for row in rows])
        if self.num_prompts is not None:
            self.num_prompts += 1
            self.left -= self._work(group, rows)

    def can_encode(self, encoder_input: EncoderInput, group: SequenceGroup) -> bool:
        """Whether the group's encoder input, which cannot be cut, may run now, and the group have a row in the same
        step: both fit, or it is the first prompt of this step."""
        if not self.num_prompts:
            return True
        known = encoder_input.key in self.encoder_runs
        count = 0 if known else len(encoder_input.tokens)
        left = self.left if known else self.left - self.limit.costs.encoding(count)
        return count + len(group.sequences) <= self.budget and left >= 1.0

    def encode(self, encoder_input: EncoderInput, group: SequenceGroup) -> None:
        """Run the encoder over this input; another group's run over an equal one serves both."""
        found = self.encoder_runs.get(encoder_input.key)
        if found is None:
            found = self.encoder_runs[encoder_input.key] = EncoderRun()
            # However long the input is, the group gets a row: a failed step ends only groups that have one.
            counts = [count for _, count in group.work()]
            least = len(counts) if max(counts) == 1 else 1
            self.budget = max(self.budget - len(encoder_input.tokens), least)
            self.left -= self.limit.costs.encoding(len(encoder_input.tokens))
        found.groups.append(group)

    def drop(self, group: SequenceGroup) -> list[tuple[int, int]]:
        """Remove a group again; returns the copies that are no longer needed."""
        rows = self.rows.pop(group, [])
        for key, run in list(self.encoder_runs.items()):
            run.groups = [other for other in run.groups if other is not group]
            if not run.groups:
                del self.encoder_runs[key]
        self.budget += sum(row.count for row in rows)
        self.left += self._work(group, rows)
        return self.copies.pop(group, [])

    def _work(self, group: SequenceGroup, rows: list[Row]) -> float:
        costs, scored, beside = self.limit.costs, _scores(group), _beside(group)
        if group.unchunked:
            return sum(self._reading(group, row.count) for row in rows)
        work = sum(costs.work(row.start, row.count, scored, beside) for row in rows)
        return work + costs.score * sum(len(row.drafts) for row in rows)

    def _reading(self, group: SequenceGroup, count: int) -> float:
        pooling = group.request.pooling
        return self.limit.costs.encoding(count, 0 if pooling is None else len(pooling.positions))


def _scores(group: SequenceGroup) -> bool:
    return group.request.decoding.prompt_logprobs is not None and not group.started


def _beside(group: SequenceGroup) -> int:
    return 0 if group.encoder_input is None else len(group.encoder_input.tokens)
