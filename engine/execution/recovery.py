"""A step that could not be computed, for whatever reason, is halved until a single request fails.

The parts are steps in flight like others, computed one after the other. Requests are divided first. If memory is
missing, which is no request's fault, a request's prompt chunk is cut as well, and last its rows are computed
separately. So a request fails only if not even one token of one row can be computed. The size that was too large is
remembered: the next steps are planned below it, or divided before they are tried, until some succeed.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineDeadError
from engine.execution.executor import Executor
from engine.execution.memory import is_out_of_memory
from engine.interface.outputs import RequestDelta
from engine.scheduling.budget import StepLimit
from engine.scheduling.in_flight import Step
from engine.scheduling.plan import EncoderBatch, Float32, StepPlan, StepResult, TokenScores
from engine.scheduling.row import Row
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SequenceGroup

logger = logging.getLogger("octavo.engine")

Number = TypeVar("Number", bound=np.generic)

# Steps that must succeed before steps may be twice as large again. This number doubles after each one that did not
# (however many parts it was computed in), until steps may reach their full size again.
_PATIENCE, _MOST_PATIENCE = 64, 4096
_UNBOUNDED = 2**31


class TooLarge(Exception):
    """A step is not launched, because a step of its size recently lacked memory."""


class Recovery:
    """Recovers from steps that fail, and remembers the limits that the last memory shortages showed. `scheduler`: the
    scheduler of the steps in flight.

    Attributes:
        tokens: current maximum of a step with prompts (and encoder inputs).
        rows: current maximum of a step.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor):
        self._scheduler = scheduler
        self._executor = executor
        self.tokens = self.rows = _UNBOUNDED
        self._works = True  # something was computed since the last step that failed as a whole
        self._patience = self._longer = _PATIENCE  # current limits; set once the step being recovered has lacked memory
        self._good = 0  # steps since the last shortage, or since the limits were raised

    def limit(self, given: StepLimit) -> StepLimit:
        """The limit on the next step: the given limit, lowered if a recent step lacked memory."""
        if self.tokens == _UNBOUNDED:
            return given
        return replace(given, tokens=min(given.tokens, self.tokens), least=min(given.least, 1.0))

    def check(self, plan: StepPlan) -> None:
        """Raise TooLarge if the plan is larger than the current limits."""
        if not self._holds(plan):
            raise TooLarge

    def succeeded(self, *, partly: bool) -> None:
        """A step succeeded; partly: more parts of it are in flight."""
        self._works = True
        if partly or self.tokens == self.rows == _UNBOUNDED:
            return
        self._good += 1
        if self._good >= self._patience:
            self._good = 0
            most = self._scheduler.config
            self.tokens = _raised(self.tokens, 2 * most.max_num_batched_tokens)  # those of an encoder as well
            self.rows = _raised(self.rows, most.max_num_seqs)
            if self.tokens == self.rows == _UNBOUNDED:
                self._patience = _PATIENCE
                logger.info("Steps are back to full size after the earlier failures.")

    def recover(self, error: Exception) -> list[RequestDelta]:
        """Divide the oldest step in flight, which could not be computed, or end the one request in it.

        Returns:
            News of requests that ended.

        Raises:
            EngineDeadError: no more steps can be computed; the step's requests have ended.
        """
        scheduler, steps = self._scheduler, self._scheduler.in_flight
        step = steps.oldest
        steps.recall()
        if not step.is_part:
            self._longer = min(2 * self._patience, _MOST_PATIENCE)
        self._note(step.plan, error)
        if scheduler.skip():  # no request waits for it any more
            return []
        is_short = isinstance(error, TooLarge) or is_out_of_memory(error)
        if not step.is_part:
            self._works = False
            if not is_short:
                logger.error("a step of %d tokens in %d rows failed", *_sizes(step), exc_info=error)
        deltas: list[RequestDelta] = []
        if is_short or len({row.group for row in step.live()}) > 1 or any(row.drafts for row in step.live()):
            pairs = [(group, pair) for group, own in step.copies.items() for pair in own]
            for group, problem in self._copy(pairs).items():
                deltas += self._fail(problem, [group])
            if step not in steps:  # all its requests have ended
                return deltas
            steps.copied()
            if steps.split():
                return deltas
            rows = step.live()
            if len(rows) > 1 or isinstance(error, TooLarge):
                try:
                    result = self._compute(rows, steps.plan(step).encoder)
                    self._works = True
                    return deltas + scheduler.update(result)
                except Exception as problem:
                    error = problem
        if not (self._works or step.was_postponed) and steps.continues:
            steps.postpone()  # the other parts will show whether the fault is the request's
            return deltas
        return deltas + self._fail(error)

    def _fail(self, error: Exception, groups: list[SequenceGroup] | None = None) -> list[RequestDelta]:
        """End these requests of the oldest step, or all of them, if the fault is theirs. Raises EngineDeadError if the
        fault is not theirs; all requests of the step have ended."""
        if not self._works or isinstance(error, EngineDeadError):
            self._try_one_token(error)
            self._works = True
        ended = groups or dict.fromkeys(row.group for row in self._scheduler.in_flight.oldest.live())
        for group in ended:
            logger.error("request %s cannot be computed", group.request.request_id, exc_info=error)
        return self._scheduler.fail(f"the engine failed to compute a step: {_named(error)}", groups)

    def _try_one_token(self, error: Exception) -> None:
        """Run a trial step of one token: if it succeeds, the fault is the requests'. Raises EngineDeadError if the
        trial failed; the requests of all steps in flight have ended."""
        try:
            self._executor.trial()
        except Exception as second:
            while self._scheduler.in_flight:
                self._scheduler.fail(f"the engine failed to compute a step: {_named(error)}")
            raise EngineDeadError(
                f"steps can no longer be computed: {_named(error)}; even a step of one token fails: {_named(second)}"
            ) from second

    def _copy(self, pairs: Sequence[tuple[SequenceGroup, tuple[int, int]]]) -> dict[SequenceGroup, Exception]:
        """Copy pages, fewer at a time if that fails: no page is the source of one copy and the target of another.
        Returns the requests whose pages could not be copied even so, and why."""
        if not pairs:
            return {}
        try:
            self._executor.copy_pages(np.array([pair for _, pair in pairs], dtype=np.int32))
        except Exception as error:
            self._release(error)
            if len(pairs) == 1:
                return {pairs[0][0]: error}
        else:
            return {}
        half = len(pairs) // 2
        return self._copy(pairs[:half]) | self._copy(pairs[half:])

    def _compute(self, rows: list[Row], encoder: EncoderBatch | None) -> StepResult:
        """The answer to rows of one request, which are sampled together. If they lack memory together, one half is
        computed after the other, and the first one includes the encoder run. Raises Exception: what the executor raises
        for a single row, or for a reason other than missing memory."""
        plan = replace(self._scheduler.in_flight.plan_rows(rows), encoder=encoder)
        if len(rows) == 1 or self._holds(plan):
            try:
                return self._executor.launch(plan).result()
            except Exception as error:
                self._note(plan, error)
                if len(rows) == 1 or not is_out_of_memory(error):
                    raise
        half = len(rows) // 2
        return join([self._compute(rows[:half], encoder), self._compute(rows[half:], None)])

    def _holds(self, plan: StepPlan) -> bool:
        return plan.num_rows <= self.rows and (_decodes(plan) or _size(plan) <= self.tokens)

    def _release(self, error: Exception) -> None:
        """Release the memory of a failed attempt. The error's frames keep tensors alive, and so device memory that
        other requests need."""
        traceback.clear_frames(error.__traceback__)
        if is_out_of_memory(error):
            self._executor.release()

    def _note(self, plan: StepPlan | None, error: Exception) -> None:
        """Release what a failed attempt held; learn from a shortage, and log it."""
        self._release(error)
        if plan is None or not is_out_of_memory(error):
            return
        self._scheduler.stats.num_oom_retries += 1
        drafted = plan.sampling is not None and plan.sampling.spans is not None
        if _size(plan) // 2 < plan.num_rows and not drafted:  # the number of rows is what is large
            self.rows = max(min(self.rows, plan.num_rows) // 2, 1)
        else:
            self.tokens = max(min(self.tokens, _size(plan)) // 2, 1)
        self._patience, self._good = self._longer, 0
        logger.warning(
            "Out of memory in a step of %d tokens in %d rows. It is computed in smaller parts, and the next steps are "
            "kept smaller (%s). If this happens often, lower --max-num-batched-tokens (for long prompts) or "
            "--max-num-seqs (for many answers at a time), or leave more memory outside the KV cache: lower "
            "--gpu-memory-utilization.",
            _size(plan), plan.num_rows, str(error).split("\n")[0],
        )  # fmt: skip


def _join_watched(results: Sequence[StepResult]) -> Float32 | None:
    """Log-probabilities of watched tokens; some of the parts may have none."""
    if all(result.watched is None for result in results):
        return None
    nothing = [np.zeros((len(result.tokens), 0), dtype=np.float32) for result in results]
    return _stack([none if part.watched is None else part.watched for part, none in zip(results, nothing, strict=True)])


def join(results: Sequence[StepResult]) -> StepResult:
    """The answer to rows that were computed separately, from the parts' answers in order."""
    prompts = [result.prompt_logprobs for result in results if result.prompt_logprobs is not None]
    return StepResult(
        tokens=_stack([result.tokens for result in results]),
        scores=_stack([result.scores for result in results]),
        logprobs=_stack([result.logprobs for result in results]),
        ranks=_stack([result.ranks for result in results]),
        top_ids=_stack([result.top_ids for result in results]),
        top_logprobs=_stack([result.top_logprobs for result in results]),
        watched=_join_watched(results),
        prompt_logprobs=_join_scores(prompts) if prompts else None,
        pooled=tuple(row for result in results for row in result.pooled),
    )


def _join_scores(scores: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(
        logprobs=np.concatenate([part.logprobs for part in scores]),
        ranks=np.concatenate([part.ranks for part in scores]),
        top_ids=_stack([part.top_ids for part in scores]),
        top_logprobs=_stack([part.top_logprobs for part in scores]),
    )


def _stack(arrays: Sequence[NDArray[Number]]) -> NDArray[Number]:
    """Stack rows of different widths; columns that a row does not have are 0."""
    width = max(array.shape[1] for array in arrays)
    return np.concatenate([np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in arrays])


def _sizes(step: Step) -> tuple[int, int]:
    return sum(row.count for row in step.rows), len(step.rows)


def _size(plan: StepPlan) -> int:
    """The number of tokens, including an encoder's."""
    return plan.num_tokens + (0 if plan.encoder is None else len(plan.encoder.token_ids))


def _decodes(plan: StepPlan) -> bool:
    """Whether every row has a single token, so that no row can be shortened."""
    return plan.num_tokens == plan.num_rows and plan.encoder is None and not plan.unchunked


def _raised(limit: int, most: int) -> int:
    return _UNBOUNDED if 2 * limit >= most else 2 * limit


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
