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

from engine.execution.pending import PendingStep
from engine.interface.outputs import RequestDelta
from engine.scheduling.in_flight import InFlightStep
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.row import Row
from engine.stepping import Stepping

EVERYONE = "0123456789"
EVENTS = (
    "tokens not known", "rows for nothing", "left to the next step", "drained", "broken at the launch", "broken later",
    "broken ahead", "planned again", "copies of broken steps", "parts",
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
        self.strikes: list[bool] = []  # whether the next launches break with their answers, or at once
        self.waits = False  # for a step with copies
        self.broken: InFlightStep | None = None  # what is launched while that is in flight computes garbage
        self.guilty = ""  # last digits of the requests that break alone, too
        self.written: set[int] = set()
        self.violations: list[Exception] = []

    def copy_pages(self, copies: np.ndarray) -> None:
        self.sim._copy(*copies.T)

    def trial(self) -> None:
        """It works."""

    def release(self) -> None:
        """Nothing is kept."""

    def launch(self, plan: StepPlan) -> PendingStep:
        try:
            return self._launch(plan)
        except Broken:
            raise
        except Exception as error:  # not to be taken for a step that breaks
            self.violations.append(error)
            raise

    def _launch(self, plan: StepPlan) -> PendingStep:
        sim = self.sim
        (step,) = [step for step in sim.scheduler.in_flight if step.plan is plan]
        if step.is_part:
            return self._launch_part(plan, step.rows)
        if plan.sources is not None:
            assert not plan.token_ids[plan.sources >= 0].any()
            plan = replace(plan, token_ids=np.where(plan.sources < 0, plan.token_ids, self.sampled[plan.sources]))
        rows = step.rows
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
            made = Late(sim.execute(plan, rows), garble=lambda: self._break(plan))
            self.broken = sim.scheduler.in_flight.newest
        else:
            made = Late(sim.execute(plan, rows))
            if any(other is self.broken for other in sim.scheduler.in_flight):
                made.made.tokens[:] += 1
                self._garble(plan)
        result = made.made
        if plan.sampling is not None:
            self.sampled = result.tokens[:, 0]
        return PendingStep(candidates=made, prompt_logprobs=result.prompt_logprobs)

    def forget(self) -> None:
        """The broken step is over."""
        self.broken = None

    def _break(self, plan: StepPlan) -> None:
        self.forget()
        self._garble(plan)

    def _garble(self, plan: StepPlan) -> None:
        self.sim.tokens[plan.copies[:, 1]] = -7
        self.sim._garble(plan, set())

    def _launch_part(self, plan: StepPlan, rows: list[Row]) -> PendingStep:
        assert not len(plan.copies)
        self.sim.ahead["parts"] += 1
        if any(row.group.request.request_id[-1] in self.guilty for row in rows):
            self.sim._garble(plan, self.written)
            raise Broken
        result = self.sim.execute(plan, rows)
        if plan.sampling is not None:
            self.sampled = result.tokens[:, 0]
        self.written.update([] if plan.encoder is None else plan.encoder.slots.tolist())
        return PendingStep(candidates=result)


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

        def planned_again(step: InFlightStep) -> StepPlan:
            plan = plan_again(step)
            self.ahead["planned again"] += not step.is_part
            assert plan.sources is None
            return plan

        scheduler.schedule = lambda limit: self._planned(schedule)  # type: ignore[method-assign, assignment, misc]
        scheduler.schedule_ahead = planned_ahead  # type: ignore[method-assign, assignment]
        steps.end = ended  # type: ignore[method-assign]
        steps.plan = planned_again  # type: ignore[method-assign]

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
