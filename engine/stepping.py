"""One step after the other: planned, launched, applied; and what is done when one fails.

At depth 0 a step is applied before the next one is planned. At depth 1 the next one is planned and launched while it
runs, so that the device has work while its answer is read and applied here.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import EngineDeadError
from engine.execution.isolation import join, run_apart
from engine.execution.memory import is_out_of_memory
from engine.execution.pending import PendingStep
from engine.execution.retry import SmallerSteps, TooLarge
from engine.execution.runner import ModelRunner
from engine.execution.warmup import trial
from engine.outputs import RequestDelta
from engine.scheduling.budget import UNLIMITED, StepBudget, StepLimit, StepWork
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler

logger = logging.getLogger("octavo.engine")


@dataclass(slots=True)
class _Launched:
    """A step in flight.

    Attributes:
        plan: what runs; None where it must be planned once more, since the step before it failed.
        answer: what it answers, or will, or why it could not be launched.
        began: when planning it began.
        ended: when it was over, if it was when `launch` returned.
    """

    plan: StepPlan | None
    answer: PendingStep | Exception
    began: float
    ended: float | None = None


class Stepping:
    """Drives a scheduler and a runner.

    Args:
        scheduler: plans.
        budget: of a step's time, if that is limited.
        depth: steps that are planned before an answer is known: 0 or 1.
    """

    def __init__(self, scheduler: Scheduler, budget: StepBudget | None, *, depth: int):
        self._scheduler = scheduler
        self._budget = budget
        self._smaller = SmallerSteps(scheduler)
        self._depth = depth
        self._in_flight: deque[_Launched] = deque()  # as in `Scheduler.flights`
        self._last_end = 0.0

    def advance(self, runner: ModelRunner) -> list[RequestDelta]:
        """Apply one step, and launch what can run before or behind it; the news.

        Raises:
            EngineDeadError: no step can be computed any more.
        """
        try:
            self._fill(runner)
            news = self._land(runner) if self._in_flight else self._scheduler.take_outbox()
            if self._depth and not self._in_flight:
                # Nothing could run ahead of that answer. The device gets its next step before the news are told.
                self._begin(runner)
            return news
        except Exception:
            raise
        except BaseException:  # Ctrl-C: its handler may go on with other requests
            self._in_flight.clear()
            while self._scheduler.flights:
                self._scheduler.fail("interrupted")
            raise

    def _fill(self, runner: ModelRunner) -> None:
        """See to it that steps are in flight: one, and another one ahead of its answer."""
        if self._in_flight and self._scheduler.skip():
            self._in_flight.popleft()  # all its requests have ended: its answer is not needed

        if not self._in_flight:
            self._begin(runner)
        elif self._in_flight[0].plan is None:
            self._in_flight.clear()
            self._launch(runner, self._scheduler.flights.again)
        if self._depth and self._in_flight and isinstance(self._in_flight[0].answer, PendingStep):
            self._launch(runner, lambda: self._scheduler.schedule_ahead(self._limit))

    def _begin(self, runner: ModelRunner) -> None:
        """Launch a step where none is in flight, if there is one."""
        self._launch(runner, lambda: self._scheduler.schedule(self._limit))

    def _limit(self) -> StepLimit:
        return self._smaller.limit(self._budget.limit() if self._budget else UNLIMITED)

    def _launch(self, runner: ModelRunner, planned: Callable[[], StepPlan | None]) -> None:
        began = time.perf_counter()
        plan = planned()
        if plan is None:
            return
        try:
            if not self._smaller.holds(plan):
                raise TooLarge
            step = runner.launch(plan)
            answer: PendingStep | Exception = step
            is_over = bool(self._depth) and step.ready
        except Exception as error:
            answer, is_over = error, False
        launched = _Launched(plan, answer, began)
        if is_over:
            launched.ended = time.perf_counter()
        self._in_flight.append(launched)

    def _land(self, runner: ModelRunner) -> list[RequestDelta]:
        """Apply the answer of the oldest step."""
        step = self._in_flight.popleft()
        plan, answer = step.plan, step.answer
        assert plan is not None
        try:
            if isinstance(answer, Exception):
                raise answer
            result = answer.result()
        except Exception as error:
            for later in self._in_flight:
                later.plan = None
            if self._smaller.concerns(error):
                return self._smaller.finish(runner, plan, error, self._isolate)
            logger.exception("a step of %d tokens in %d rows failed", plan.num_tokens, plan.num_rows)
            return self._isolate(runner, error)
        deltas = self._scheduler.update(plan, result)
        self._smaller.succeeded()
        # The device begins with a step when it has ended the one before.
        began, self._last_end = max(step.began, self._last_end), step.ended or time.perf_counter()
        seconds = self._last_end - began
        self._scheduler.stats.step_seconds += seconds
        if self._budget is not None:
            self._budget.observe(StepWork.of(plan), seconds)
        return deltas

    def _isolate(self, runner: ModelRunner, error: Exception, *, retry: bool = True) -> list[RequestDelta]:
        """Fail the requests that the oldest step's exception belongs to, and finish the step for the others.

        Args:
            retry: a part that lacks memory is computed in smaller ones; else that fails its request, too.

        Raises:
            EngineDeadError: no request could be computed, and no step at all can be.
        """
        scheduler = self._scheduler
        parts = scheduler.flights.parts()
        results: dict[str, StepResult] = {}
        failures: dict[str, Exception] = dict.fromkeys(parts, error)
        if len(parts) > 1:
            results, failures = run_apart(runner, parts)
            short = next((name for name in failures if is_out_of_memory(failures[name])), None)
            if retry and short is not None:  # no request is at fault
                return self._smaller.finish(runner, parts[short], failures[short], self._isolate)
        causes = {name: f"the engine failed to compute a step: {_named(failures[name])}" for name in failures}
        deltas = scheduler.fail(causes)
        if not results:
            try:
                trial(runner)
            except Exception as second:
                raise EngineDeadError(
                    f"no step can be computed any more: {_named(error)}; a step of one token: {_named(second)}"
                ) from second
            return deltas
        return deltas + scheduler.update(scheduler.flights.remainder(), join(list(results.values())))


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
