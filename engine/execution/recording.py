"""The recording of work on a device, to be started again as a whole."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Protocol

import torch

_ROUNDS, _TOGETHER = 5, 8


class Recorder(Protocol):
    """Makes of a function without arguments one that does the same again."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]: ...


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: the largest should be recorded first."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            function()  # libraries and Triton set themselves up, which cannot be recorded
        before.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                function()
        except BaseException:
            self._begin_anew()
            raise
        finally:  # a recording that fails at its end does not leave its stream
            torch.cuda.set_stream(before)
        return graph.replay

    def _begin_anew(self) -> None:
        """A recording that failed leaves its pool as one that is being recorded, and its stream capturing: no other
        could use them. What was recorded before keeps the pool that it has."""
        with contextlib.suppress(RuntimeError):  # where the recording came to its end, that has ended already
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def seconds(self, replay: Callable[[], None]) -> float:
        """The median time of a replay, of some rounds of several, of which none waits to be started."""
        times = []
        with torch.cuda.device(self._device):
            for _ in range(_ROUNDS + 1):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                for _ in range(_TOGETHER):
                    replay()
                end.record()
                end.synchronize()
                times.append(float(start.elapsed_time(end)) / 1e3 / _TOGETHER)
        return statistics.median(times[1:])


def eager(function: Callable[[], None]) -> Callable[[], None]:
    """The `Recorder` of devices without graphs."""
    return function
