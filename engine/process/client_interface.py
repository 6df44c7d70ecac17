"""The server's interface to an engine, wherever the engine runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine.errors import AdapterError, OctavoError
from engine.interface.adapters import AdapterInfo
from engine.interface.cache_map import CacheMap
from engine.interface.outputs import EngineInfo, EngineStats, RequestDelta
from engine.interface.request import EngineInput, PoolingParams, SamplingParams

# Takes a request's deltas, or the error that ended the request.
Deliver = Callable[[RequestDelta | OctavoError], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Whether the engine has work, and for how many seconds it has made no progress.

    An engine that is not idle and whose `seconds` exceed any step's duration is stuck.
    """

    idle: bool
    seconds: float


class EngineClient(ABC):
    """Submit requests, receive deltas.

    Use from one event loop only. All methods may be called after the engine died: they raise `EngineDeadError`.
    """

    info: EngineInfo
    num_restarts: int = 0
    # The loaded adapters by name.
    adapters: Mapping[str, AdapterInfo] = MappingProxyType({})
    # Called with each message from the engine before the requests are: one per step and per batch of commands.
    on_news: Callable[[Sequence[RequestDelta], EngineStats], None] | None = None

    @abstractmethod
    def submit(
        self,
        request_id: str,
        input: EngineInput,
        params: SamplingParams | PoolingParams,
        deliver: Deliver,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
        tenant: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Submit a request. `deliver` is called on the event loop with each delta as it arrives: the first one, without
        choices, says that the request was accepted; the last one has `finished` set. If the request ends with an error,
        `deliver` is called with it: `InvalidRequestError` if the request is impossible, `EngineDeadError` if the engine
        died. `deliver` must not raise. Raises InvalidRequestError if the id is in use, or the request cannot be encoded
        in a message; EngineDeadError if the engine is dead."""

    @abstractmethod
    def abandon(self, request_id: str) -> None:
        """Deliver nothing more for a request, and end it soon; unknown or finished ids are ignored. It never raises."""

    async def generate(
        self, request_id: str, input: EngineInput, params: SamplingParams | PoolingParams, **terms: Any
    ) -> AsyncGenerator[RequestDelta, None]:
        """`submit` as an iterator over the deltas; takes the `terms` that `submit` takes.

        The request is aborted, and its pages freed, when the iterator is closed early or its task is cancelled. Unread
        deltas are returned one by one; none is lost. Raises InvalidRequestError: from the first `__anext__`, if the
        request is impossible; EngineDeadError if the engine died before the request finished.
        """
        news: asyncio.Queue[RequestDelta | OctavoError] = asyncio.Queue()
        self.submit(request_id, input, params, news.put_nowait, **terms)
        finished = False
        try:
            while not finished:
                item = await news.get()
                if isinstance(item, OctavoError):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished:
                self.abandon(request_id)

    @abstractmethod
    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices, soon; unknown and finished ids are ignored."""

    def warm_grammars(self) -> None:
        """Let the engine prepare for grammars in the background; does nothing if the engine is prepared or dead."""
        return

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter; running requests continue. Raises AdapterError if the adapter cannot be loaded; nothing was
        changed; EngineDeadError if the engine is dead, or died before it answered."""
        raise AdapterError("this engine loads no adapters.")

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; its unfinished requests end with an error. Raises AdapterError if no adapter has this
        name; EngineDeadError if the engine is dead, or died before it answered."""
        raise AdapterError("this engine loads no adapters.")

    @abstractmethod
    async def settled(self) -> None:
        """Wait until the engine is dead or has carried out all earlier commands, so that `stats` include them."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The latest counters and gauges."""

    @abstractmethod
    async def cache_map(self) -> CacheMap:
        """The contents of the pages and the requests that use them, taken between two steps after the call. Raises
        EngineDeadError if the engine is dead, or died before it answered. RequestFailedError if a bug of ours prevents
        the answer."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the engine can serve."""

    @property
    @abstractmethod
    def progress(self) -> Progress:
        """Whether the engine makes progress; a dead engine (see `is_alive`) counts as idle."""

    async def wait_failed(self) -> str:
        """Wait until the engine has died and will not be started again; returns the reason."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    @abstractmethod
    def give_up(self, cause: str) -> None:
        """Treat a stuck engine as one that has died."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and free its resources; idempotent."""
