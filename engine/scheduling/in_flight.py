"""Steps that are planned but whose answers are not applied yet: the only record of what is in flight.

There is one such step, or two if the scheduler plans one step ahead, and more while a failed step is computed in parts.
A step keeps its rows, its page copies and its encoder runs, so it can be planned again, whole or in two parts. The new
plan computes the same positions and copies the same pages. Therefore the sources of copies keep their content until the
step is over (`BlockPool.pin`), even if they are released meanwhile. Everything else that a row reads is held by its
sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from engine.scheduling.batch import build_plan
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.encoder_input import EncoderInput
from engine.scheduling.plan import LateResult, StepPlan
from engine.scheduling.row import Row
from engine.scheduling.sequence import Sequence, SequenceGroup
from engine.scheduling.state_slots import StateSlots
from engine.scheduling.step import EncoderRun, SearchAhead


@dataclass(slots=True, eq=False)
class Step:
    """A step whose answer is not applied yet."""

    rows: list[Row]  # the rows as they were planned; some may have become void
    copies: dict[SequenceGroup, list[tuple[int, int]]]  # pages copied for each request
    encoder_runs: list[EncoderRun]
    # its beam searches whose previous step's answer is not applied yet
    searches: dict[SequenceGroup, SearchAhead] = field(default_factory=dict)
    # the plan that is computed; None if it has to be planned again, from the rows that are not void by then
    plan: StepPlan | None = None
    # the launched answer, or why the launch failed; None before the launch
    answer: LateResult | Exception | None = None
    is_part: bool = False  # whether it is a part of a step that could not be computed as a whole
    was_postponed: bool = False  # whether it has failed before any other part of that step was computed
    began: float = 0.0  # when its planning began, in seconds of `time.perf_counter()`
    ended: float | None = None  # when it ended, if it ended with its launch

    def live(self) -> list[Row]:
        return [row for row in self.rows if not row.is_void]

    def take_inputs(self, groups: set[SequenceGroup]) -> list[EncoderInput]:
        """The encoder inputs that these requests still need to be encoded. Inputs of other requests are left out."""
        for run in self.encoder_runs:
            run.groups = [group for group in run.groups if group in groups]
        self.encoder_runs = [run for run in self.encoder_runs if run.groups]
        return [run.encoder_input for run in self.encoder_runs if not run.done]


class InFlightSteps:
    """All steps in flight, in the order in which they run."""

    def __init__(self, pool: BlockPool, block_size: int, states: StateSlots | None = None):
        self._pool = pool
        self._size = block_size
        self._states = states
        self._queue: deque[Step] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._queue)

    @property
    def oldest(self) -> Step:
        """The step that is answered next."""
        return self._queue[0]

    @property
    def newest(self) -> Step:
        """The step that was planned last."""
        return self._queue[-1]

    def begin(self, step: Step) -> None:
        """Add a planned step. The sources of its copies are pinned already."""
        for row in step.rows:
            row.sequence.num_in_flight += row.count
            row.sequence.num_pending += row.sampled
        self._queue.append(step)

    def end(self) -> Step:
        """Remove the oldest step, which is over."""
        step = self._queue.popleft()
        for row in step.rows:
            if not row.is_void:
                row.sequence.num_in_flight -= row.count
                row.sequence.num_pending -= row.sampled
        for group in list(step.copies):
            self._drop_copies(step, group)
        return step

    def leave(self, group: SequenceGroup) -> None:
        """A request has ended or is preempted: nothing will be computed for it again."""
        for step in self._queue:
            self._drop_copies(step, group)
            if (search := step.searches.pop(group, None)) is not None:
                self._pool.free(search.pages)

    def take_search(self, group: SequenceGroup) -> tuple[Step, SearchAhead] | None:
        """The step that continues a search whose answer is being applied, and its rows there; None if none does."""
        for step in self._queue:
            if (search := step.searches.pop(group, None)) is not None:
                return step, search
        return None

    def pending(self) -> dict[Sequence, int]:
        """The sequences that the newest step samples, each with the number of its last token among all sampled ones."""
        ends = accumulate([row.sampled for row in self.newest.rows])
        return {
            row.sequence: end - 1
            for end, row in zip(ends, self.newest.rows, strict=True)
            if row.sampled and not row.is_void
        }

    def encodes(self, encoder_input: EncoderInput | None) -> bool:
        """Whether a step in flight runs the encoder over an equal input."""
        return encoder_input is not None and any(
            encoder_input.key == run.encoder_input.key for step in self._queue for run in step.encoder_runs
        )

    @property
    def continues(self) -> bool:
        """Whether the step behind the oldest one is another part of the same step."""
        return len(self._queue) > 1 and self._queue[1].is_part

    def postpone(self) -> None:
        """Let the other parts of the step be computed before the oldest one is tried again."""
        step = self._queue.popleft()
        step.plan = step.answer = step.ended = None
        step.was_postponed = True
        self._queue.insert(sum(other.is_part for other in self._queue), step)

    def recall(self) -> None:
        """The oldest step has failed: steps that were launched after it have computed with its leftovers, so drop their
        results."""
        for step in self._queue:
            if step is not self.oldest:
                step.plan = step.answer = step.ended = None

    def plan(self, step: Step) -> StepPlan:
        """The oldest step's plan again, with all that is now known; some of its rows are not void."""
        step.rows = step.live()
        copies = [pair for pairs in step.copies.values() for pair in pairs]
        inputs = step.take_inputs({row.group for row in step.rows})
        step.plan = build_plan(step.rows, copies, self._size, inputs)
        return step.plan

    def plan_rows(self, rows: list[Row]) -> StepPlan:
        """Some rows of the oldest step, without its copies and encoder runs."""
        return build_plan(rows, [], self._size)

    def copied(self) -> None:
        """The oldest step's pages are copied, and need not be copied again."""
        for group in list(self.oldest.copies):
            self._drop_copies(self.oldest, group)

    def encoded(self, done: Step) -> None:
        """A step has run the encoder: parts that were to run it over the same inputs need not do so."""
        keys = {run.encoder_input.key for run in done.encoder_runs}
        for run in (run for step in self._queue for run in step.encoder_runs):
            run.done |= run.encoder_input.key in keys

    def split(self) -> bool:
        """Divide the oldest step into two, both to be launched in turn; returns False if there is nothing to divide.
        Requests are divided where half of the tokens are; a single request has half of its tokens in each. Drafts are
        left out
        first: no request is to fail for what was only expected.

        All its pages are copied first (`copied`), because a part may write what a later one would have to copy. An
        encoder input that requests of both parts have stays in both, since the requests of the first may fail (see
        `encoded`).
        """
        step = self.oldest
        rows = step.live()
        if any(row.drafts for row in rows):
            self._queue[0] = Step([self._without_drafts(row) for row in rows], {}, step.encoder_runs, is_part=True)
            return True
        sizes: dict[SequenceGroup, int] = {}
        for row in rows:
            sizes[row.group] = sizes.get(row.group, 0) + row.count
        for run in step.encoder_runs:
            for group in run.groups:
                sizes[group] = sizes.get(group, 0) + len(run.encoder_input.tokens)
        groups = list(dict.fromkeys(row.group for row in rows))
        later: list[EncoderRun] = []
        if len(groups) > 1:
            chosen, half = {groups[0]}, sum(sizes[group] for group in groups) / 2
            taken = sizes[groups[0]]
            for group in groups[1:-1]:
                taken += sizes[group]
                if taken > half:
                    break
                chosen.add(group)
            first = [row for row in rows if row.group in chosen]
            second = [row for row in rows if row.group not in chosen]
            later = [
                EncoderRun([group for group in one.groups if group not in chosen], one.done)
                for one in step.encoder_runs
            ]
            for run in step.encoder_runs:
                run.groups = [group for group in run.groups if group in chosen]
        elif any(row.count > 1 for row in rows) and not groups[0].unchunked:
            halves = self._halves(rows)
            if halves is None:
                return False
            first, second = halves
        else:
            return False
        encoder_runs = [run for run in step.encoder_runs if run.groups]
        self._queue[0] = Step(first, {}, encoder_runs, is_part=True)
        later = [run for run in later if run.groups]
        self._queue.insert(1, Step(second, {}, later, is_part=True))
        return True

    def _halves(self, rows: list[Row]) -> tuple[list[Row], list[Row]] | None:
        """The first half of the tokens of each row that has several, and the rest; None if there is no slot for a state
        between them."""
        first, second = [], []
        for row in rows:
            half, between, rest = row.count // 2, row.state, row.state
            if half and self._states is not None:
                states = self._states.split(row, half)
                if states is None:
                    return None
                between, rest = states
            if half:
                first.append(replace(row, count=half, sampled=0, state=between))
            second.append(replace(row, start=row.start + half, count=row.count - half, state=rest))
        return first, second

    def set_aside(self) -> list[list[int]]:
        """Pages that searches may need. No sequence has them yet."""
        return [search.pages for step in self._queue for search in step.searches.values()]

    def pinned(self) -> list[int]:
        """Sources of copies, each as often as it is pinned."""
        return [source for step in self._queue for pairs in step.copies.values() for source, _ in pairs]

    def _without_drafts(self, row: Row) -> Row:
        row.sequence.num_in_flight -= len(row.drafts)
        row.sequence.num_pending -= len(row.drafts)
        row = row.keeping(0)
        if self._states is not None:
            self._states.shorten(row)
        return row

    def _drop_copies(self, step: Step, group: SequenceGroup) -> None:
        for source, _ in step.copies.pop(group, ()):
            self._pool.unpin(source)
