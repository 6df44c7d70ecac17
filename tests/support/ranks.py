"""Ranks that divide a model, as threads of the test's process: quicker than processes, and a test can break one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from engine import EngineConfig
from engine.backends.native.ranks import Ranks, shared_memory
from engine.errors import RankError
from engine.execution.executor import LocalExecutor, LocalReading
from engine.execution.page_content import Content
from engine.execution.pending import LateStep
from engine.execution.starting import start
from engine.interface.adapters import AdapterInfo
from engine.scheduling.plan import Int32, StepPlan


@dataclass(frozen=True)
class Readings:
    """An adapter that all ranks read."""

    each: list[LocalReading]

    @property
    def ready(self) -> bool:
        return all(reading.ready for reading in self.each)

    def wait(self) -> None:
        for reading in self.each:
            reading.wait()


class ThreadRanks:
    """An executor (`engine.execution.executor.Executor`) of several ranks, each with a thread of its own."""

    def __init__(self, config: EngineConfig):
        count = config.tensor_parallel_size
        file = shared_memory(count)
        self.ranks = [Ranks(rank, count, file) for rank in range(count)]
        os.close(file)
        self._threads = [ThreadPoolExecutor(1) for _ in self.ranks]
        self.executors: list[LocalExecutor] = []
        self.executors = self._all(lambda rank: start(config, ranks=self.ranks[rank]))
        self.facts = self.executors[0].facts

    def _all(self, act: Callable[[int], Any]) -> list[Any]:
        """The result of every rank; raises the cause if some fail."""
        futures = [thread.submit(act, rank) for rank, thread in enumerate(self._threads)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        causes = [error for error in errors if not isinstance(error, RankError)]
        for error in causes or errors:
            raise error
        return [future.result() for future in futures]

    def launch(self, plan: StepPlan) -> LateStep:
        if plan.sampling is not None:
            plan = replace(plan, sampling=plan.sampling.filled())  # once for all ranks
        step: LateStep = self._all(lambda rank: self.executors[rank].launch(plan))[0]
        return step

    def copy_pages(self, copies: Int32) -> None:
        self._all(lambda rank: self.executors[rank].copy_pages(copies))

    def contents(self) -> Sequence[Content]:
        return []

    def read_adapter(self, name: str, source: Any) -> Readings:
        return Readings([executor.read_adapter(name, source) for executor in self.executors])

    def load_adapter(self, reading: Any, slot: int) -> AdapterInfo:
        infos = self._all(lambda rank: self.executors[rank].load_adapter(reading.each[rank], slot))
        info: AdapterInfo = infos[0]
        return info

    def unload_adapter(self, slot: int) -> None:
        self._all(lambda rank: self.executors[rank].unload_adapter(slot))

    def trial(self) -> None:
        self._all(lambda rank: self.executors[rank].trial())

    def release(self) -> None:
        pass

    def close(self) -> None:
        for executor in self.executors:
            executor.close()
        for thread in self._threads:
            thread.shutdown()


@contextmanager
def in_threads() -> Iterator[None]:
    """Engines that are made within the block run their ranks in threads."""
    with mock.patch("engine.engine._start", lambda config, read, drafter: ThreadRanks(config)):
        yield
