"""Recording work on a device, so that it can be repeated as a whole."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from typing import Protocol

import torch

_ROUNDS, _TOGETHER = 5, 8


class Recorder(Protocol):
    """Turns a function without arguments into one that repeats its work."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]: ...


class CudaRecorder:
    """Records CUDA graphs that share one memory pool: the largest should be recorded first."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            function()  # libraries and Triton initialise themselves, which cannot be recorded
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
        """After a failed recording, its pool is still marked as recording and its stream as capturing: no other
        recording could use them. Earlier recordings keep their pool."""
        with contextlib.suppress(RuntimeError):  # if the recording reached its end, this has ended already
            torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def seconds(self, replay: Callable[[], None]) -> float:
        """The median time of a replay, over some rounds of several replays, none of which waits to be started."""
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
    """The `Recorder` for devices without graphs."""
    return function
