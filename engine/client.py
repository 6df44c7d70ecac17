"""How the server talks to the engine: one interface, whatever the engine runs in.

`ThreadEngineClient` runs it in a thread of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineDeadError, InvalidRequestError, OctavoError, RequestFailedError
from engine.outputs import EngineInfo, EngineStats, RequestDelta
from engine.request import EngineInput, PoolingParams, SamplingParams

logger = logging.getLogger("octavo.client")

_News = RequestDelta | OctavoError


class EngineClient(ABC):
    """Submit requests, receive deltas.

    Use from one event loop only. All methods are safe to call after the engine died: they raise
    `EngineDeadError`.
    """

    info: EngineInfo

    @abstractmethod
    def generate(
        self,
        request_id: str,
        input: EngineInput,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> AsyncIterator[RequestDelta]:
        """Submit a request and iterate over its deltas; the first, without choices, says that it was
        accepted, the last one has `finished` set.

        The request is aborted, and its pages freed, when the iterator is closed early or its task is
        cancelled. Deltas that pile up while nobody reads are handed out one by one, none is lost.

        Raises:
            InvalidRequestError: from the first `__anext__`, if the request is impossible.
            EngineDeadError: the engine died before the request finished.
        """

    @abstractmethod
    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices, soon; unknown or finished ids are ignored."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The latest counters and gauges."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """The engine can serve."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine and free what it holds; idempotent."""


class ThreadEngineClient(EngineClient):
    """Loads an engine, then runs it in its own thread; one hand-over to the event loop per step.

    Args:
        config: the engine's settings.

    Raises:
        ModelLoadError, UnsupportedModelError, ConfigError: the engine cannot start.
    """

    def __init__(self, config: EngineConfig):
        self._engine = Engine(config)
        self.info = self._engine.info
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[_News]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stats = self._engine.stats()
        self._death: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        request_id: str,
        input: EngineInput,
        params: SamplingParams | PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        self._check_alive()
        if request_id in self._streams:
            raise InvalidRequestError(
                f"request id {request_id!r} is in use by an unfinished request.", param="request_id"
            )
        self._loop = asyncio.get_running_loop()
        stream: asyncio.Queue[_News] = asyncio.Queue()
        self._streams[request_id] = stream

        def add() -> None:
            try:
                self._engine.add_request(
                    request_id, input, params, priority=priority, cache_salt=cache_salt, deadline=deadline
                )
                self._hand_over([(request_id, RequestDelta(request_id=request_id, choices=()))])
            except OctavoError as error:
                self._hand_over([(request_id, error)])
            except Exception as error:  # a fault of ours; it must not take the other requests along
                logger.exception("request %s could not be added", request_id)
                self._hand_over([(request_id, RequestFailedError(f"{type(error).__name__}: {error}"))])

        self._commands.put(add)
        finished = False
        try:
            while not finished:
                news = await stream.get()
                if isinstance(news, OctavoError):
                    finished = True
                    raise news
                finished = news.finished
                yield news
        finally:
            self._streams.pop(request_id, None)
            if not finished:
                self._commands.put(lambda: self._engine.abort_request(request_id))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._check_alive()
        self._commands.put(lambda: self._engine.abort_request(request_id, choice))
        stream = self._streams.get(request_id)
        if choice is None and stream is not None:
            stream.put_nowait(RequestDelta(request_id=request_id, choices=(), finished=True))

    def stats(self) -> EngineStats:
        self._check_alive()
        return self._stats

    @property
    def is_alive(self) -> bool:
        return self._death is None and not self._closed

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._commands.put(None)
        await asyncio.to_thread(self._thread.join)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(f"the engine has stopped: {self._death}")
        if self._closed:
            raise EngineDeadError("the engine is shut down")

    # ------------------------------------------------------------ in the engine's thread

    def _run(self) -> None:
        try:
            while self._obey():
                deltas = self._engine.step_deltas() if self._engine.has_unfinished_requests() else []
                self._stats = self._engine.stats()
                if deltas:
                    self._hand_over([(delta.request_id, delta) for delta in deltas])
            reason = "the engine is shut down"
        except BaseException as error:
            logger.exception("the engine's thread died")
            self._death = reason = f"{type(error).__name__}: {error}"
        finally:
            self._engine.close()
        self._hand_over([(request_id, EngineDeadError(reason)) for request_id in list(self._streams)])

    def _obey(self) -> bool:
        """Carry out the commands that have come; wait for one if there is nothing to compute. False
        ends the thread."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            self._stats = self._engine.stats()

    def _hand_over(self, news: list[tuple[str, _News]]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._deliver, news)

    def _deliver(self, news: list[tuple[str, _News]]) -> None:
        for request_id, item in news:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put_nowait(item)


def start_engine(config: EngineConfig) -> EngineClient:
    """Load an engine and return a client for it; blocks until it can serve.

    Raises:
        ModelLoadError, UnsupportedModelError, ConfigError: the engine cannot start.
    """
    return ThreadEngineClient(config)
