"""A step whose memory is not there fails no request: it is computed in smaller parts, and the next steps hold less.

The part that lacked memory is halved again and again: its requests are divided, a request's chunk of a prompt is cut,
and last its rows are computed apart. Only a request of which not even one token of one row can be computed is failed.
What was too large is remembered, so that the steps after it are planned, or cut, below that size; after some steps
that went well they may be larger again.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import replace
from typing import Protocol

import torch

from engine.execution.isolation import join
from engine.execution.memory import is_out_of_memory
from engine.execution.runner import ModelRunner
from engine.outputs import RequestDelta
from engine.scheduling.batch import Row
from engine.scheduling.budget import StepLimit
from engine.scheduling.plan import Int32, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler

logger = logging.getLogger("octavo.engine")

# Steps that must go well before steps may be twice as large again; twice as many after each one that did not.
_PATIENCE, _MOST_PATIENCE = 64, 4096
_UNBOUNDED = 2**31


class Isolate(Protocol):
    """Fails the requests for which the oldest step cannot be computed, and finishes it for the others."""

    def __call__(self, runner: ModelRunner, error: Exception, *, retry: bool) -> list[RequestDelta]: ...


class TooLarge(Exception):
    """A step is not launched, since one of its size lacked memory not long ago."""


class SmallerSteps:
    """What the last shortages of memory taught, and how a step that lacks it is computed.

    Args:
        scheduler: whose oldest step in flight it is.

    Attributes:
        tokens: most of a step with prompts (and encoder inputs) at present.
        rows: most of a step.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self.tokens = self.rows = _UNBOUNDED
        self._patience = _PATIENCE
        self._good = 0  # steps since the last shortage, or since the limits were raised

    def limit(self, given: StepLimit) -> StepLimit:
        """What the next step may hold, of what it might hold for other reasons."""
        if self.tokens == _UNBOUNDED:
            return given
        return replace(given, tokens=min(given.tokens, self.tokens), least=min(given.least, 1.0))

    def holds(self, plan: StepPlan) -> bool:
        """The plan is not larger than what may be tried at present."""
        return plan.num_rows <= self.rows and (_decodes(plan) or _size(plan) <= self.tokens)

    def concerns(self, error: Exception) -> bool:
        """A step that raised this is to be computed in smaller parts."""
        return isinstance(error, TooLarge) or is_out_of_memory(error)

    def succeeded(self) -> None:
        """A step went well."""
        if self.tokens == self.rows == _UNBOUNDED:
            return
        self._good += 1
        if self._good >= self._patience:
            self._good = 0
            most = self._scheduler.config
            self.tokens = _raised(self.tokens, 2 * most.max_num_batched_tokens)  # an encoder's as well
            self.rows = _raised(self.rows, most.max_num_seqs)
            if self.tokens == self.rows == _UNBOUNDED:
                logger.info("steps may be as large as the settings say again")

    def finish(
        self,
        runner: ModelRunner,
        plan: StepPlan,
        error: Exception,
        isolate: Isolate,
    ) -> list[RequestDelta]:
        """Compute the oldest step in flight, which could not be computed as this plan, in smaller parts; the news.

        Args:
            error: why not.
            isolate: is called for what cannot be computed even so.
        """
        self._note(runner, plan, error)
        flights, deltas, parts = self._scheduler.flights, list[RequestDelta](), 1
        if (whole := flights.again()) is not None:
            try:  # all parts' copies: a part may write what a later one has to copy
                self._copy(runner, whole.copies)
            except Exception as broken:
                return isolate(runner, broken, retry=False)
        while parts:
            part = flights.again()
            if part is None:  # no request waits for it any more
                self._scheduler.skip()
                parts -= 1
            elif not self.holds(part) and flights.split():
                parts += 1
            else:
                rows, result = flights.oldest.live(), self._attempt(runner, part)
                if isinstance(result, StepResult):
                    deltas += self._scheduler.update(part, result)
                    parts -= 1
                elif (is_out_of_memory(result) or len({row.group for row in rows}) > 1) and flights.split():
                    parts += 1
                else:
                    logger.error("a request cannot be computed", exc_info=result)
                    deltas += isolate(runner, result, retry=False)
                    parts -= 1
        if isinstance(error, TooLarge):
            self.succeeded()
        return deltas

    def _attempt(self, runner: ModelRunner, part: StepPlan) -> StepResult | Exception:
        """The answer to the oldest step, or why there is none."""
        try:
            rows = self._scheduler.flights.oldest.live()
            return self._compute(runner, rows, replace(part, copies=part.copies[:0]))
        except Exception as error:
            self._note(runner, part, error)
            return error

    def _compute(self, runner: ModelRunner, rows: list[Row], plan: StepPlan) -> StepResult:
        """The answer to rows of the oldest step; those of one request that lack memory together one half after the
        other.

        Raises:
            Exception: what the runner raises; for want of memory only where the step can be cut otherwise, or a row
                cannot be computed alone.
        """
        divisible = len(rows) > 1 and plan.num_tokens == plan.num_rows and len({row.group for row in rows}) == 1
        if not divisible:
            return runner.execute(plan)
        if self.holds(plan):
            try:
                return runner.execute(plan)
            except Exception as error:
                self._note(runner, plan, error)
                if not is_out_of_memory(error):
                    raise
        half, flights = len(rows) // 2, self._scheduler.flights
        first = self._compute(runner, rows[:half], replace(flights.plan(rows[:half]), encoder=plan.encoder))
        return join([first, self._compute(runner, rows[half:], flights.plan(rows[half:]))])

    def _copy(self, runner: ModelRunner, copies: Int32) -> None:
        """Copy pages, fewer at a time where memory is short: no page is the source of one copy and the target of
        another."""
        try:
            runner.cache.copy_pages(copies)
            return
        except Exception as error:
            if not is_out_of_memory(error) or len(copies) < 2:
                raise
            _release(runner, error)
        half = len(copies) // 2
        self._copy(runner, copies[:half])
        self._copy(runner, copies[half:])

    def _note(self, runner: ModelRunner, plan: StepPlan, error: Exception) -> None:
        """Give back what a failed attempt held; learn from a shortage, and say it."""
        traceback.clear_frames(error.__traceback__)  # they keep tensors alive
        if not is_out_of_memory(error):
            return
        if runner.model.device.type == "cuda":
            torch.cuda.empty_cache()  # torch keeps the memory of others
        self._scheduler.stats.num_oom_retries += 1
        if _size(plan) // 2 < plan.num_rows:  # hardly more than a token for each: the rows are what is many
            self.rows = max(min(self.rows, plan.num_rows) // 2, 1)
        else:
            self.tokens = max(min(self.tokens, _size(plan)) // 2, 1)
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._good = 0
        logger.warning(
            "out of memory in a step of %d tokens in %d rows: it is computed in smaller parts, and the next steps are "
            "kept smaller (%s). If that happens often, lower --max-num-batched-tokens (for long prompts) or "
            "--max-num-seqs (for many answers at a time), or leave more memory beside the pages: lower "
            "--gpu-memory-utilization.",
            _size(plan), plan.num_rows, str(error).split("\n")[0],
        )  # fmt: skip


def _size(plan: StepPlan) -> int:
    """Tokens, an encoder's too."""
    return plan.num_tokens + (0 if plan.encoder is None else len(plan.encoder.token_ids))


def _decodes(plan: StepPlan) -> bool:
    """No row could have fewer tokens."""
    return plan.num_tokens == plan.num_rows and plan.encoder is None and not plan.whole


def _raised(limit: int, most: int) -> int:
    return _UNBOUNDED if 2 * limit >= most else 2 * limit


def _release(runner: ModelRunner, error: Exception) -> None:
    """Give back what a failed attempt held: its frames keep tensors alive, and torch keeps the memory of others."""
    traceback.clear_frames(error.__traceback__)
    if runner.model.device.type == "cuda":
        torch.cuda.empty_cache()
