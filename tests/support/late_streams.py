"""Streams, events and graphs of `support.late_device`."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from support.late_device import LateDevice

Work = Callable[[], None]
DEVICES: list[LateDevice] = []  # the last one is in use


class Memory:
    """Memory of the device: it is freed when no tensor is there any more."""

    def __init__(self, owner: Graph | None):
        self.owner = owner


class Cell:
    """What a tensor will be; what the device's work refers to."""

    def __init__(self, meta: Tensor):
        self.meta = meta
        self.value: Tensor | None = None

    def get(self) -> Tensor:
        assert self.value is not None, "the device reads what it has not computed"
        return self.value


class Stream:
    """Work of a device, in its order."""

    def __init__(self, device: Any = None, priority: int = 0, *, ordinary: bool = True):
        self.device = torch.device("cuda", DEVICES[-1].index_of(device))
        self.work: deque[Work] = deque()
        self.ordinary = ordinary

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        event.wait(self)

    def drain(self, until: Callable[[], bool] = lambda: False) -> None:
        with _disable_current_modes(), torch.inference_mode():
            while self.work and not until():
                self.work.popleft()()


class Event:
    """A place in a stream's work."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._timing = enable_timing
        self._stream: Stream | None = None
        self._done: set[str] = {"done"}

    def record(self, stream: Stream | None = None) -> None:
        device = DEVICES[-1]
        self._stream, self._done = stream or device.stream(), set()
        device.enqueue(lambda done=self._done: done.add("done"), self._stream)

    def wait(self, stream: Stream | None = None) -> None:
        source, done = self._stream, self._done
        if source is not None:
            device = DEVICES[-1]
            device.enqueue(lambda: source.drain(lambda: bool(done)), stream or device.stream())

    def query(self) -> bool:
        device = DEVICES[-1]
        device.refuse("a query")
        device.advance(self._stream)
        return bool(self._done)

    def synchronize(self) -> None:
        DEVICES[-1].refuse("an event")
        if self._stream is not None:
            self._stream.drain(lambda: bool(self._done))

    def elapsed_time(self, other: Event) -> float:
        if not (self._timing and other._timing and self._done and other._done):
            raise RuntimeError("both events must be over, and made with enable_timing")
        return 1.0


class Graph:
    """A CUDA graph."""

    def __init__(self, keep_graph: bool = False):
        self.work: list[Work] = []
        self.stream: Stream | None = None
        self.own: list[tuple[weakref.ref[Memory], Cell]] = []
        self.others: dict[int, tuple[weakref.ref[Memory], str]] = {}

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        device = DEVICES[-1]
        self.stream = device.stream()
        if not self.stream.ordinary:
            raise RuntimeError("the default stream cannot be recorded")
        if pool in device.filling:
            raise RuntimeError(f"beginAllocateToPool: already recording to mempool_id {pool}")
        device.recording, self._pool = self, pool
        device.filling.add(pool)

    def capture_end(self) -> None:
        device = DEVICES[-1]
        assert device.recording is self
        assert device.stream() is self.stream
        device.recording = None
        if sys.exc_info()[0] is not None:  # before the pool is left, as torch does it
            raise RuntimeError("operation failed due to a previous error during capture")
        device.end_pool(self.stream.device.index, self._pool)

    def replay(self) -> None:
        gone = [text for memory, text in self.others.values() if memory() is None]
        if gone:
            raise RuntimeError(f"a graph uses memory that has been freed: {gone[0]}")
        assert self.stream is not None
        DEVICES[-1].enqueue(self._run, DEVICES[-1].stream(self.stream.device))

    def _run(self) -> None:
        for memory, cell in self.own:
            if memory() is None:  # another graph of the pool may have been there
                cell.value = None
        for work in self.work:
            work()
