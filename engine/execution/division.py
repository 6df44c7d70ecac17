"""The runner of one rank, if a model is divided among several (`engine.model.sharding`), and the checks before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.backends import native
from engine.backends.native.ranks import Ranks
from engine.config import EngineConfig
from engine.errors import ConfigError, UnsupportedModelError
from engine.execution.executor import LocalExecutor
from engine.execution.pending import LateStep
from engine.host.cpus import choose_threads
from engine.interface.speculation import parse_speculative
from engine.model.sharding import refusals
from engine.model.spec import ModelSpec
from engine.scheduling.plan import StepPlan, StepResult

_FEW = 8  # ranks that may be tried on any machine


class RankExecutor(LocalExecutor):
    """A rank's runner. All ranks get the same plans in the same order; the answer of rank 0 counts. If a rank fails in
    a step, the others fail in it, too (RankError)."""

    def __init__(self, executor: LocalExecutor, ranks: Ranks):
        super().__init__(executor.runner, executor.facts)
        self._ranks = ranks

    def launch(self, plan: StepPlan) -> LateStep:
        with self._together():
            step = super().launch(plan)
        return step if self._ranks.rank == 0 else LateStep(candidates=StepResult.empty())

    def trial(self) -> None:
        with self._together():
            super().trial()

    @contextmanager
    def _together(self) -> Iterator[None]:
        with failing(self._ranks):
            self._ranks.begin()
            yield


@contextmanager
def failing(ranks: Ranks) -> Iterator[None]:
    """Let the other ranks know if the block fails here."""
    try:
        yield
    except BaseException:
        ranks.fail()
        raise


def check_ranks(config: EngineConfig) -> None:
    """Refuse settings that contradict several ranks, and ranks that would fill the machine with processes before one of
    them reads the model. Raises ConfigError: names the settings."""
    cpus = choose_threads(None, {}).cpus
    most = max(_FEW, int(cpus))
    if config.tensor_parallel_size > most:
        raise ConfigError(
            f"tensor_parallel_size must be at most {most} on this machine, got {config.tensor_parallel_size}: "
            f"each rank is a process, and {cpus:g} CPUs are available."
        )
    refused = [name for name in ("async_scheduling", "kv_disk") if getattr(config, name)]
    if config.speculative_config is not None:
        method = parse_speculative(config.speculative_config).method
        refused += [f"speculative_config with method {method}"] * (method in ("draft_model", "mtp", "eagle3"))
    if config.tensor_parallel_size > 1 and refused:
        raise ConfigError(
            f"{refused[0]} does not work with tensor_parallel_size {config.tensor_parallel_size}. Remove one of them."
        )


def check_divisible(config: EngineConfig, spec: ModelSpec, device: torch.device) -> None:
    """Refuse a model that the ranks of the settings cannot divide. Raises UnsupportedModelError or ConfigError with the
    reason."""
    count = config.tensor_parallel_size
    setting = f"tensor_parallel_size is {count}, but"
    if count == 1:
        return
    if device.type != "cpu":
        raise ConfigError(f"{setting} GPUs cannot divide a model yet. Use --device cpu, or remove the setting.")
    if not native.available():
        raise ConfigError(
            f"{setting} ranks exchange numbers with the native library, which is not available here (see the log). "
            "Install a C++ compiler, or remove the setting."
        )
    if reasons := refusals(spec, count):
        raise UnsupportedModelError(
            f"{setting} {config.model} has parts that cannot be divided among {count} ranks: {', '.join(reasons)}. "
            "Use another --tensor-parallel-size, or remove it."
        )
