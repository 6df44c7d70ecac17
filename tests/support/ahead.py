"""The paged simulator one step ahead: driven by `engine.stepping` as an engine is, with a runner that computes in its
memory. Steps may fail when they are launched or when their answers are read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from paged_simulator import Simulator

from engine.execution.pending import LateStep
from engine.interface.outputs import RequestDelta
from engine.scheduling.in_flight import Step
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.row import Row
from engine.scheduling.sequence import SequenceGroup
from engine.stepping import Stepping

EVERYONE = "0123456789"
EVENTS = (
    "tokens not known", "rows for nothing", "left to the next step", "drained", "broken at the launch", "broken later",
    "broken ahead", "planned again", "copies of broken steps", "parts",
    "searches ahead", "beams that parted ahead", "new pages ahead", "searches for nothing", "as the host found",
)  # fmt: skip


class Broken(RuntimeError):
    """Made by the test."""


@dataclass
class Late:
    """A result that is asked for later, or an error that shows only then."""

    made: StepResult
    garble: Callable[[], None] | None = None
    wait: Callable[[], None] | None = None
    ready: bool = False

    @property
    def tokens(self) -> Any:
        return self.made.tokens

    def result(self) -> StepResult:
        if self.wait is not None:
            self.wait()
        if self.garble is not None:
            self.garble()
            raise Broken
        return self.made


class AheadRunner:
    """An executor."""

    def __init__(self, simulator: AheadSimulator):
        self.sim = simulator
        self.sampled = np.zeros(0, dtype=np.int32)
        self.last: StepResult | None = None  # what was sampled last
        self.chosen: dict[Step, StepPlan] = {}  # steps in flight, with the beams that were chosen here
        self.strikes: list[bool] = []  # whether the next launches break with their answers, or at once
        self.waits = False  # for a step with copies
        self.broken: Step | None = None  # what is launched while that is in flight computes garbage
        self.guilty = ""  # last digits of the requests that break alone, too
        self.written: set[int] = set()
        self.violations: list[Exception] = []

    def copy_pages(self, copies: np.ndarray) -> None:
        self.sim._copy(*copies.T)

    def trial(self) -> None:
        """It works."""

    def release(self) -> None:
        """Nothing is kept."""

    def launch(self, plan: StepPlan) -> LateStep:
        try:
            return self._launch(plan)
        except Broken:
            raise
        except Exception as error:  # not to be taken for a step that breaks
            self.violations.append(error)
            raise

    def _launch(self, plan: StepPlan) -> LateStep:
        sim = self.sim
        (step,) = [step for step in sim.scheduler.in_flight if step.plan is plan]
        if step.is_part:
            return self._launch_part(plan, step.rows)
        if plan.sources is not None:
            assert not plan.token_ids[plan.sources >= 0].any()
            plan = replace(plan, token_ids=np.where(plan.sources < 0, plan.token_ids, self.sampled[plan.sources]))
        rows = computed = step.rows
        if plan.searches is not None:
            plan, computed = self._search(plan, rows)
            self.chosen[step] = plan
        if self.strikes and (len(plan.copies) or not self.waits):
            self.waits = False
            self.written = set()
            sim.ahead["broken ahead"] += len(sim.scheduler.in_flight) > 1
            sim.ahead["copies of broken steps"] += len(plan.copies)
            if not self.strikes.pop(0):
                sim.ahead["broken at the launch"] += 1
                self._garble(plan)
                sim._copy(*plan.copies[: len(plan.copies) // 2].T)
                sim._garble(plan, set())
                raise Broken
            sim.ahead["broken later"] += 1
            made = Late(sim.execute(plan, rows, computed), garble=lambda: self._break(plan))
            self.broken = sim.scheduler.in_flight.newest
        else:
            made = Late(sim.execute(plan, rows, computed))
            if any(other is self.broken for other in sim.scheduler.in_flight):
                made.made.tokens[:] += 1
                self._garble(plan)
        result = made.made
        if plan.sampling is not None:
            self.sampled, self.last = result.tokens[:, 0], result
        return LateStep(candidates=made, prompt_logprobs=result.prompt_logprobs)

    def _search(self, plan: StepPlan, rows: list[Row]) -> tuple[StepPlan, list[Row]]:
        """The plan with the beams that go on, found by plain loops, and what its rows compute."""
        searches, before, size = plan.searches, self.last, self.sim.size
        assert searches is not None
        assert before is not None
        is_broken = any(other is self.broken for other in self.sim.scheduler.in_flight)
        computed, first, copies = list(rows), 0, plan.copies.tolist()
        plan = replace(plan, token_ids=plan.token_ids.copy(), slots=plan.slots.copy())
        tables = plan.block_tables.copy()
        for number, row in enumerate(searches.rows.tolist()):
            self.sim.ahead["searches ahead"] += 1
            width, place, column = (int(part[number]) for part in (searches.widths, searches.places, searches.columns))
            stops = searches.stop_ids[searches.stops[number] : searches.stops[number + 1]].tolist()
            found = []
            for beam in range(width):
                for token, score in zip(before.tokens[place + beam], before.scores[place + beam], strict=True):
                    if score > -np.inf and token not in stops:
                        total = float(np.float32(searches.scores[first + beam]) + score)
                        # What is behind a broken step may choose anything.
                        found.append((total if is_broken else -total, len(found), beam, int(token)))
            live = [one[2:] for one in sorted(found)][:width]
            live += [(0, 0)] * (width - len(live))
            for beam, (parent, token) in enumerate(live):
                table = plan.block_tables[row + parent].copy()
                own = int(searches.pages[first + beam])
                if searches.fresh[number]:
                    assert table[column] == 0
                    table[column] = own
                    self.sim.ahead["new pages ahead"] += 1
                elif parent in [other for other, _ in live[:beam]]:
                    copies.append([int(table[column]), own])
                    table[column] = own
                    self.sim.ahead["beams that parted ahead"] += 1
                tables[row + beam] = table
                at = int(plan.query_start[row + beam])
                plan.token_ids[at] = token
                plan.slots[at] = table[column] * size + plan.positions[at] % size
                group = rows[row + beam].group
                sequence = group.sequences[parent].gone_on(group.request.decoding, token)
                computed[row + beam] = replace(rows[row + beam], sequence=sequence, num_releases=0)
            first += width
        return replace(plan, block_tables=tables, copies=np.array(copies, np.int32).reshape(-1, 2)), computed

    def compare(self) -> None:
        """What was chosen here, the host has found, too, where it has the answer that it depends on."""
        for step, plan in self.chosen.items():
            broken = any(other is self.broken for other in self.sim.scheduler.in_flight)
            if step not in self.sim.scheduler.in_flight or step.plan is None or broken:
                continue
            assert plan.searches is not None
            rows = [row + beam for row, width in zip(plan.searches.rows, plan.searches.widths, strict=True)
                    for beam in range(width)]  # fmt: skip
            for i in rows:
                row = step.rows[i]
                if row.is_void or row.group in step.searches:
                    continue
                first = self.sim._first_seen(row.start) // self.sim.size
                table = row.sequence.table.tolist()
                assert plan.block_tables[i, first : len(table)].tolist() == table[first:]
                assert plan.token_ids[plan.query_start[i]] == row.sequence.tokens[row.start]
                self.sim.ahead["as the host found"] += 1
        self.chosen = {step: plan for step, plan in self.chosen.items() if step in self.sim.scheduler.in_flight}

    def forget(self) -> None:
        """The broken step is over."""
        self.broken = None

    def _break(self, plan: StepPlan) -> None:
        self.forget()
        self._garble(plan)

    def _garble(self, plan: StepPlan) -> None:
        self.sim.tokens[plan.copies[:, 1]] = -7
        self.sim._garble(plan, set())

    def _launch_part(self, plan: StepPlan, rows: list[Row]) -> LateStep:
        assert not len(plan.copies)
        self.sim.ahead["parts"] += 1
        if any(row.group.request.request_id[-1] in self.guilty for row in rows):
            self.sim._garble(plan, self.written)
            raise Broken
        result = self.sim.execute(plan, rows)
        if plan.sampling is not None:
            self.sampled, self.last = result.tokens[:, 0], result
        self.written.update([] if plan.encoder is None else plan.encoder.slots.tolist())
        return LateStep(candidates=result)


class AheadSimulator(Simulator):
    """The simulator at depth 1, or at depth 0 for comparison.

    Attributes:
        ahead: what happened.
    """

    def __init__(self, *, depth: int = 1, **settings: Any):
        super().__init__(**settings)
        self.ahead = dict.fromkeys(EVENTS, 0)
        self.silence = ExitStack()
        self.runner: Any = AheadRunner(self)
        self.stepping = Stepping(self.scheduler, self.runner, None, depth=depth)
        scheduler, steps = self.scheduler, self.scheduler.in_flight
        schedule, ahead, end, plan_again = scheduler.schedule, scheduler.schedule_ahead, steps.end, steps.plan
        take_search = steps.take_search

        def planned_ahead(limit: Any) -> StepPlan | None:
            plan = self._planned(ahead, ahead=True)
            self.ahead["left to the next step"] += plan is None
            self.ahead["drained"] += scheduler._drains
            if plan is not None and plan.sources is not None:
                self.ahead["tokens not known"] += int((plan.sources >= 0).sum())
            return plan

        def ended() -> Any:
            step = end()
            self.ahead["rows for nothing"] += sum(row.is_void for row in step.rows)
            return step

        def planned_again(step: Step) -> StepPlan:
            plan = plan_again(step)
            self.ahead["planned again"] += not step.is_part
            assert plan.sources is None
            assert plan.searches is None
            return plan

        def taken(group: SequenceGroup) -> Any:
            found = take_search(group)
            assert group.beam is not None
            self.ahead["searches for nothing"] += found is not None and len(group.sequences) < group.beam.num_beams
            return found

        scheduler.schedule = lambda limit: self._planned(schedule)  # type: ignore[method-assign, assignment, misc]
        scheduler.schedule_ahead = planned_ahead  # type: ignore[method-assign, assignment]
        steps.end = ended  # type: ignore[method-assign]
        steps.plan = planned_again  # type: ignore[method-assign]
        steps.take_search = taken  # type: ignore[method-assign]

    def __enter__(self) -> AheadSimulator:
        super().__enter__()
        self.silence.enter_context(mock.patch("engine.execution.recovery.logger"))  # hundreds of tracebacks
        return self

    def __exit__(self, *error: Any) -> None:
        self.silence.close()
        super().__exit__(*error)

    def step(self) -> list[RequestDelta]:
        deltas = self.stepping.advance()
        if self.runner.violations:
            raise self.runner.violations[0]
        self._deliver(deltas)
        self.check()
        self.runner.compare()
        return deltas

    def fail(self) -> list[RequestDelta]:
        return self.fail_apart(EVERYONE)

    def fail_apart(self, last_digits: Any) -> list[RequestDelta]:
        """The next step that is launched breaks, or the next two; it need not be the one whose answer is applied
        next."""
        self.runner.guilty = "".join(sorted(last_digits))
        number = len(self.requests)
        self.runner.strikes = [number % 2 == 0, number % 3 == 0][: 1 + number % 5 // 3]
        self.runner.waits = number % 7 < 4
        return self.step()

    def step_bound(self) -> int:
        return 3 * super().step_bound()
