"""A launched step, whose answer arrives when the device has computed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from engine.scheduling.plan import LateResult, PooledRow, SamplingBatch, StepResult, TokenScores


class LateScores(Protocol):
    """Scores of prompt tokens that are still on their way from the device."""

    @property
    def ready(self) -> bool:
        """Whether `result` returns without waiting."""

    def result(self) -> TokenScores:
        """The scores; waits for them. Raises the device's errors."""


@dataclass(slots=True)
class PromptScores:
    """Scores of a step's prompt tokens, part by part: known ones, or ones on their way."""

    parts: Sequence[TokenScores | LateScores]

    @property
    def ready(self) -> bool:
        """Whether `result` returns without waiting."""
        return all(isinstance(part, TokenScores) or part.ready for part in self.parts)

    def result(self) -> TokenScores:
        """The scores of all parts; waits for them. Raises the device's errors."""
        known = [part if isinstance(part, TokenScores) else part.result() for part in self.parts]
        return TokenScores(
            logprobs=np.concatenate([part.logprobs for part in known]),
            ranks=np.concatenate([part.ranks for part in known]),
            top_ids=np.concatenate([part.top_ids for part in known]),
            top_logprobs=np.concatenate([part.top_logprobs for part in known]),
        )


@dataclass(slots=True, kw_only=True)
class LateStep:
    """The future answer of a launched step."""

    # the candidates of the sampled tokens; a `StepResult` if they are known already, as always on a CPU
    candidates: StepResult | LateResult
    prompt_logprobs: TokenScores | LateScores | None = None  # as in `StepResult`, or an object that returns them
    pooled: tuple[PooledRow, ...] = ()  # as in `StepResult`
    sampling: SamplingBatch | None = None  # the plan's sampling
    hidden: Tensor | None = None  # [at least T, features] of the step's tokens on the device, if the runner keeps them

    @property
    def ready(self) -> bool:
        """Whether the step is complete, so that `result` does not wait."""
        scores = self.prompt_logprobs
        if not (scores is None or isinstance(scores, TokenScores) or scores.ready):
            return False
        return isinstance(self.candidates, StepResult) or self.candidates.ready

    def result(self) -> StepResult:
        """The step's answer; waits until the device has computed it. Raises the device's errors."""
        known = self.candidates
        if not isinstance(known, StepResult):
            known = self.candidates = known.result()
        if self.sampling is not None:
            known = known.accepting(self.sampling)
        scores = self.prompt_logprobs
        if scores is None and not self.pooled:
            return known
        if scores is not None and not isinstance(scores, TokenScores):
            scores = self.prompt_logprobs = scores.result()
        return replace(known, prompt_logprobs=scores, pooled=self.pooled)
