"""What computes steps for the engine: it takes plans, gives answers, and is all that the engine knows of a device."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.execution.pending import PendingStep
from engine.execution.runner import ModelRunner
from engine.execution.warmup import trial
from engine.scheduling.plan import Int32, StepPlan


class Executor(Protocol):
    """Computes steps, in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin to compute a step. Raises what goes wrong at once; the answer raises what goes wrong later."""

    def copy_pages(self, copies: Int32) -> None:
        """Copy pages [C, 2] (source, destination), without a step."""

    def trial(self) -> None:
        """Compute a step of one token, which belongs to no request; raises what goes wrong."""

    def release(self) -> None:
        """Give back device memory that is kept for later steps."""


class LocalExecutor:
    """A runner in this process.

    Args:
        runner: what computes.
    """

    def __init__(self, runner: ModelRunner):
        self.runner = runner

    def launch(self, plan: StepPlan) -> PendingStep:
        return self.runner.launch(plan)

    def copy_pages(self, copies: Int32) -> None:
        self.runner.cache.copy_pages(copies)

    def trial(self) -> None:
        trial(self.runner)

    def release(self) -> None:
        if self.runner.model.device.type == "cuda":
            torch.cuda.empty_cache()
