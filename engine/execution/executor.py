"""The interface of the code that computes steps: it takes plans and returns answers, and is all that the engine knows
about a device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.execution.adapters import ReadAdapter
from engine.execution.page_content import Content, contents_of
from engine.execution.pending import LateStep
from engine.execution.runner import ModelRunner
from engine.execution.warmup import trial
from engine.interface.adapters import AdapterInfo
from engine.interface.outputs import EngineInfo
from engine.model.adapters import Adapter
from engine.scheduling.budget import Costs, StepWork
from engine.scheduling.needs import SequenceNeeds
from engine.scheduling.plan import Int32, StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The facts that the engine needs about the model that an executor has loaded.

    Attributes:
        info: facts that do not depend on a scheduler or the model's decoding defaults.
        needs: the memory needs of its sequences.
        costs: the costs of query-key pairs and logits.
        measured: small steps, each with the seconds that it took.
        weights: bytes of its parameters.
        num_states: number of state slots; 0 if no layer has a state.
        page_shape: `engine.execution.page_content.shape_of`.
        content_sizes: bytes of a page, then of a state slot if there are any.
    """

    info: EngineInfo
    needs: SequenceNeeds
    costs: Costs
    measured: list[tuple[StepWork, float]]
    weights: int
    num_states: int = 0
    page_shape: str = ""
    content_sizes: tuple[int, ...] = ()


class Reading(Protocol):
    """An adapter that is being read."""

    @property
    def ready(self) -> bool:
        """Whether `wait` returns without waiting."""

    def wait(self) -> None:
        """Wait until the adapter is read. Raises AdapterError if it does not fit the model, and any other error that
        occurred while it was read."""


class Executor(Protocol):
    """Computes steps, in the order in which they are launched."""

    facts: ModelFacts

    @property
    def watched(self) -> Sequence[int]:
        """The descriptors of the connections to other processes that compute: `check` when one is readable."""

    def check(self) -> None:
        """Take in news from these processes. Raises EngineDeadError if one of them has ended."""

    def launch(self, plan: StepPlan) -> LateStep:
        """Start computing a step. Raises errors that occur at once; the answer raises later ones."""

    def copy_pages(self, copies: Int32) -> None:
        """Copy pages [C, 2] (source, destination), without a step."""

    def contents(self) -> Sequence[Content]:
        """Access to the content of pages, then of state slots if there are any. Several threads may use it."""

    def read_adapter(self, name: str, source: Adapter | str) -> Reading:
        """Start reading and checking an adapter, or the one in a folder or file, while steps run."""

    def load_adapter(self, reading: Reading, slot: int) -> AdapterInfo:
        """Put an adapter that was read into an empty slot. If that fails, nothing was changed."""

    def unload_adapter(self, slot: int) -> None:
        """Empty a slot. No later step may have rows with its adapter."""

    def trial(self) -> None:
        """Compute a step of one token, which belongs to no request; raises its errors."""

    def release(self) -> None:
        """Return device memory that is kept for later steps."""

    def close(self) -> None:
        """Free the model and the pages."""


@dataclass(frozen=True, slots=True)
class LocalReading:
    """An adapter that another thread reads."""

    future: Future[ReadAdapter]

    @property
    def ready(self) -> bool:
        return self.future.done()

    def wait(self) -> None:
        self.future.result()


class LocalExecutor:
    """A runner in this process."""

    watched: Sequence[int] = ()

    def __init__(self, runner: ModelRunner, facts: ModelFacts):
        self.runner = runner
        self.facts = facts
        self._contents: Sequence[Content] = ()

    def check(self) -> None:
        pass

    def launch(self, plan: StepPlan) -> LateStep:
        return self.runner.launch(plan)

    def copy_pages(self, copies: Int32) -> None:
        self.runner.cache.copy_pages(copies)

    def contents(self) -> Sequence[Content]:
        if not self._contents:
            self._contents = contents_of(self.runner.cache)
        return self._contents

    def read_adapter(self, name: str, source: Adapter | str) -> LocalReading:
        return LocalReading(self.runner.adapters.read(name, source))

    def load_adapter(self, reading: Reading, slot: int) -> AdapterInfo:
        assert isinstance(reading, LocalReading)
        info = self.runner.adapters.load(reading.future.result(), slot)
        self.runner.kind.use_head(slot, self.runner.adapters.heads.get(slot))
        return info

    def unload_adapter(self, slot: int) -> None:
        self.runner.adapters.unload(slot)
        self.runner.kind.use_head(slot, None)

    def trial(self) -> None:
        trial(self.runner)

    def release(self) -> None:
        if self.runner.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        on_gpu = self.runner.model.device.type == "cuda"
        del self.runner, self._contents
        if on_gpu:
            torch.cuda.empty_cache()
