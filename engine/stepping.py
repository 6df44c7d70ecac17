"""The cycle of steps: each is planned, launched and applied; also what happens when one fails.

At depth 0 a step is applied before the next one is planned. At depth 1 the next step is planned and launched while one
runs, so that the device has work while the answer is read and applied here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.execution.executor import Executor
from engine.execution.recovery import Recovery
from engine.interface.outputs import RequestDelta
from engine.scheduling.budget import UNLIMITED, StepBudget, StepLimit, StepWork
from engine.scheduling.in_flight import Step
from engine.scheduling.scheduler import Scheduler


class Stepping:
    """Drives a scheduler and an executor.

    Args:
        scheduler: plans the steps, and keeps those in flight.
        budget: a limit on a step's time, if there is one.
        depth: how many steps are planned before an answer is known: 0 or 1.
        observe: is called with each step whose answer is known, before it is applied.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        budget: StepBudget | None,
        *,
        depth: int,
        observe: Callable[[Step], None] | None = None,
    ):
        self._scheduler = scheduler
        self._executor = executor
        self._budget = budget
        self._recovery = Recovery(scheduler, executor)
        self._depth = depth
        self._observe = observe
        self._last_end = 0.0

    def advance(self) -> list[RequestDelta]:
        """Apply one step, and launch what can run before or behind it; returns the news. Raises EngineDeadError if no
        more steps can be computed."""
        steps = self._scheduler.in_flight
        try:
            self._fill()
            news = self._apply(steps.oldest) if steps else self._scheduler.take_outbox()
            if self._depth and not steps:
                # Nothing could run ahead of that answer. The device gets its next step before the news is delivered.
                self._begin()
            return news
        except Exception:
            raise
        except BaseException:  # Ctrl-C: its handler may continue with other requests
            while steps:
                self._scheduler.fail("interrupted")
            raise

    def _fill(self) -> None:
        """Keep steps in flight: one, and at depth 1 another ahead of its answer."""
        steps = self._scheduler.in_flight
        while self._scheduler.skip():  # all its requests have ended, so its answer is not needed
            pass
        if not steps:
            self._begin()
        elif steps.oldest.answer is None:
            self._launch(steps.oldest)
        if self._depth and len(steps) == 1 and not isinstance(steps.oldest.answer, Exception):
            self._begin(ahead=True)

    def _begin(self, *, ahead: bool = False) -> None:
        """Plan the next step and launch it, if there is one."""
        began = time.perf_counter()
        plan = (self._scheduler.schedule_ahead if ahead else self._scheduler.schedule)(self._limit)
        if plan is not None:
            self._launch(self._scheduler.in_flight.newest, began)

    def _limit(self) -> StepLimit:
        return self._recovery.limit(self._budget.limit() if self._budget else UNLIMITED)

    def _launch(self, step: Step, began: float | None = None) -> None:
        step.began = time.perf_counter() if began is None else began
        plan = step.plan or self._scheduler.in_flight.plan(step)
        try:
            self._recovery.check(plan)
            step.answer = self._executor.launch(plan)
            if self._depth and step.answer.ready:
                step.ended = time.perf_counter()
        except Exception as error:
            step.answer = error

    def _apply(self, step: Step) -> list[RequestDelta]:
        try:
            assert step.plan is not None
            assert step.answer is not None
            if isinstance(step.answer, Exception):
                raise step.answer
            result = step.answer.result()
        except Exception as error:
            return self._recovery.recover(error)
        self._recovery.succeeded(partly=self._scheduler.in_flight.continues)
        plan = step.plan
        if self._observe is not None:
            self._observe(step)
        deltas = self._scheduler.update(result)
        # The device begins a step when it has finished the one before.
        began, self._last_end = max(step.began, self._last_end), step.ended or time.perf_counter()
        seconds = self._last_end - began
        self._scheduler.stats.step_seconds += seconds
        costs = self._scheduler.draft_costs if self._scheduler.drafting else None
        if self._budget is not None or costs is not None:
            work = StepWork.of(plan)
            if self._budget is not None:
                self._budget.observe(work, seconds)
            if costs is not None and not work.prompt_tokens:
                costs.observe(work.tokens, seconds)
        return deltas
