"""A step that was launched: its answer comes when the device has computed it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from engine.scheduling.plan import PooledRow, StepResult, TokenScores


class LateResult(Protocol):
    """Candidates that are still on their way from the device."""

    @property
    def ready(self) -> bool:
        """`result` would not wait."""

    def result(self) -> StepResult:
        """The candidates; waits for them. Raises what went wrong on the device."""


@dataclass(slots=True, kw_only=True)
class PendingStep:
    """The answer to be of a step that was launched.

    Attributes:
        candidates: of the sampled tokens; a `StepResult` where they are known already, as always on a CPU.
        prompt_logprobs, pooled: as in `StepResult`.
    """

    candidates: StepResult | LateResult
    prompt_logprobs: TokenScores | None = None
    pooled: tuple[PooledRow, ...] = ()

    @property
    def ready(self) -> bool:
        """The step is over: `result` does not wait."""
        return isinstance(self.candidates, StepResult) or self.candidates.ready

    def result(self) -> StepResult:
        """The step's answer; waits until the device has computed it. Raises what went wrong there."""
        known = self.candidates
        if not isinstance(known, StepResult):
            known = self.candidates = known.result()
        if self.prompt_logprobs is None and not self.pooled:
            return known
        return replace(known, prompt_logprobs=self.prompt_logprobs, pooled=self.pooled)
