"""A connection to an engine's process that sends commands and receives news on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from engine.errors import EngineDeadError, InvalidRequestError, OctavoError, RequestFailedError
from engine.interface.cache_map import CacheMap
from engine.interface.outputs import EngineInfo, EngineStats, RequestDelta
from engine.interface.request import EngineInput, PoolingParams, SamplingParams
from engine.process.client_interface import Deliver, EngineClient, Progress
from engine.process.messages import (
    Abort,
    JoinEngine,
    LoadAdapter,
    Look,
    News,
    UnloadAdapter,
    Warm,
    decode_news,
    encode,
    encode_add,
)

logger = logging.getLogger("octavo.client")

_MESSAGES_AT_ONCE = 64  # then other tasks run
_LONG = 0.005  # seconds of processor time for news, after which other tasks get as long


class ConnectedClient(EngineClient):
    """Talks to an engine's process over ZeroMQ.

    The event loop reads the socket itself, so a step's news need not pass through a thread. One event loop at a time
    uses it; the first call from another loop moves it there.

    Delivering news, and the work that directly follows (text, events to clients), takes at most half of the loop's
    time. Under more load, the client handles the news of several steps together, which is less work: so a crowd that
    has to be refused, or a new request, does not wait behind the tokens of hundreds of streams.
    """

    def __init__(self, name: bytes):
        self._name = name
        self._context = zmq.Context()
        self._streams: dict[str, _Stream] = {}
        self._settling: list[tuple[int, asyncio.Future[None]]] = []  # awaited commands by number
        self._looking: list[tuple[int, asyncio.Future[CacheMap]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._rest: asyncio.TimerHandle | None = None  # until news is read again
        self._stats = EngineStats()
        self._num_sent = self._num_obeyed = 0  # commands sent since the process started
        self._moved = time.monotonic()
        self._death: str | None = None
        self._closed = False

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
        self._attach()
        self._check_alive()
        if request_id in self._streams:
            raise InvalidRequestError(
                f"request id {request_id!r} is in use by an unfinished request.", param="request_id"
            )
        command = encode_add(
            request_id,
            input,
            params,
            priority=priority,
            cache_salt=cache_salt,
            deadline=deadline,
            tenant=tenant,
            adapter=adapter,
        )
        self._send(command)
        self._streams[request_id] = _Stream(self._num_sent, deliver)

    def abandon(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None and self.is_alive:
            self._send(encode(Abort(request_id)))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._check_alive()
        self._send(encode(Abort(request_id, choice)))
        stream = self._streams.pop(request_id, None) if choice is None else None
        if stream is not None:
            stream.deliver(RequestDelta(request_id=request_id, choices=(), finished=True))

    def warm_grammars(self) -> None:
        if self.is_alive:
            self._attach()
            self._send(encode(Warm()))

    async def load_adapter(self, name: str, path: str) -> None:
        await self._call(lambda call: LoadAdapter(call, name, path))

    async def unload_adapter(self, name: str) -> None:
        await self._call(lambda call: UnloadAdapter(call, name))

    async def _call(self, command: Callable[[str], LoadAdapter | UnloadAdapter]) -> None:
        """Send a command that may fail, and wait until the engine has carried it out."""
        self._attach()
        self._check_alive()
        call = f"{self._num_sent} adapters"  # no request id contains a space
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def deliver(item: RequestDelta | OctavoError) -> None:
            if future.done():  # cancelled
                return
            if isinstance(item, OctavoError):
                future.set_exception(item)
            else:
                future.set_result(None)

        self._send(encode(command(call)))
        self._streams[call] = _Stream(self._num_sent, deliver)
        await future

    async def settled(self) -> None:
        if self.is_alive and self._num_obeyed < self._num_sent:
            future = asyncio.get_running_loop().create_future()
            self._settling.append((self._num_sent, future))
            await future

    def stats(self) -> EngineStats:
        self._check_alive()
        return self._stats

    async def cache_map(self) -> CacheMap:
        self._attach()
        self._check_alive()
        self._send(encode(Look()))
        future: asyncio.Future[CacheMap] = asyncio.get_running_loop().create_future()
        self._looking.append((self._num_sent, future))
        return await future

    @property
    def is_alive(self) -> bool:
        return self._death is None and not self._closed

    @property
    def death(self) -> str | None:
        """The reason why the engine has died, or None."""
        return self._death

    @property
    def progress(self) -> Progress:
        idle = not self.is_alive or self._is_idle()
        return Progress(idle=idle, seconds=0.0 if idle else time.monotonic() - self._moved)

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine is shut down")
        if self._death is not None:
            raise EngineDeadError(f"the engine has stopped: {self._death}")

    def _is_idle(self) -> bool:
        answered = self._num_sent == self._num_obeyed
        return answered and not self._stats.num_running and not self._stats.num_waiting

    @abstractmethod
    def _attach(self) -> None:
        """Use the running event loop from now on."""

    @abstractmethod
    def _died(self, cause: str) -> None:
        """The engine can no longer serve."""

    # ------------------------------------------------------------ sending and receiving

    def _send(self, command: bytes) -> None:
        assert self._socket is not None
        if self._is_idle():
            self._moved = time.monotonic()
        self._num_sent += 1
        self._socket.send(command, zmq.NOBLOCK)  # no limit, so sending never waits
        if self._loop is not None and not self._loop.is_closed():
            # The socket's descriptor only signals changes, and sending may have consumed one.
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Deliver the news that has arrived, unless the last delivery has just taken long."""
        if self._rest is None:
            assert self._loop is not None
            # Processor time: time in which others had the core or the interpreter's lock does not count as work. The
            # event loop may read other sockets before it runs the tasks that the news wakes, so their time is measured
            # separately.
            began = time.thread_time()
            woken: list[float] = []
            self._loop.call_soon(lambda: woken.append(time.thread_time()))
            some = self._deliver_some()
            spent = time.thread_time() - began
            if some:
                self._loop.call_soon(lambda: self._delivered(spent + time.thread_time() - woken[0]))

    def _deliver_some(self) -> bool:
        received: list[bytes] = []
        with contextlib.suppress(zmq.Again):
            while self._socket is not None and len(received) < _MESSAGES_AT_ONCE:
                received.append(self._socket.recv(zmq.NOBLOCK))
        for data in received:
            try:
                self._deliver(decode_news(data))
            except msgspec.DecodeError as error:
                self._died(f"the engine's process sent an invalid message: {error}")
                break
        return bool(received)

    def _delivered(self, spent: float) -> None:
        if self._rest is None and self._socket is not None:
            assert self._loop is not None
            if spent > _LONG:
                self._loop.remove_reader(self._socket.fileno())
                self._rest = self._loop.call_later(spent, self._resume)
            else:
                self._drain()

    def _resume(self) -> None:
        self._rest = None
        if self._socket is not None and self._loop is not None:
            self._loop.add_reader(self._socket.fileno(), self._drain)
            self._drain()

    def _deliver(self, news: News) -> None:
        if news.stats.num_steps != self._stats.num_steps or news.num_commands != self._num_obeyed:
            self._moved = time.monotonic()
        self._stats, self._num_obeyed = news.stats, news.num_commands
        if self.on_news is not None:
            try:
                self.on_news(news.deltas, news.stats)
            except Exception:  # an observer must not stop the news
                logger.exception("a listener for the engine's news failed")
        if news.adapters is not None:
            self.adapters = {info.name: info for info in news.adapters}
        for request_id, failure in news.failed.items():
            self._hand_over(request_id, failure.error(), news.num_commands)
        for delta in news.deltas:
            self._hand_over(delta.request_id, delta, news.num_commands)
        if self._settling:
            self._settle(self._num_obeyed)
        if self._looking:
            self._show(news.cache_map)

    def _hand_over(self, request_id: str, item: RequestDelta | OctavoError, num_commands: int) -> None:
        stream = self._streams.get(request_id)
        # News sent before the request arrived is about an earlier request with the same id.
        if stream is not None and num_commands >= stream.since:
            if isinstance(item, OctavoError) or item.finished:
                del self._streams[request_id]
            stream.deliver(item)

    def _settle(self, num_obeyed: float) -> None:
        waiting = self._settling
        self._settling = [entry for entry in waiting if entry[0] > num_obeyed]
        for number, future in waiting:
            if number <= num_obeyed and not future.done():
                future.set_result(None)

    def _show(self, cache_map: CacheMap | None) -> None:
        waiting = self._looking
        self._looking = [entry for entry in waiting if entry[0] > self._num_obeyed]
        for number, future in waiting:
            if number <= self._num_obeyed and not future.done():
                if cache_map is not None:
                    future.set_result(cache_map)
                else:
                    future.set_exception(
                        RequestFailedError("the map could not be made; see the engine's log for the reason")
                    )

    def _end_streams(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.deliver(EngineDeadError(reason))
        self._settle(math.inf)
        looking, self._looking = self._looking, []
        for _, future in looking:
            if not future.done():
                future.set_exception(EngineDeadError(reason))

    # ------------------------------------------------------------ successive connections

    def _connect(self, address: str, info: EngineInfo, stats: EngineStats) -> None:
        self.info, self._stats = info, stats
        self.adapters = {adapter.name: adapter for adapter in info.adapters}
        self._num_sent = self._num_obeyed = 0
        self._moved = time.monotonic()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.ROUTING_ID, self._name)
        self._socket.connect(address)
        self._death = None
        self._socket.send(encode(JoinEngine()), zmq.NOBLOCK)
        if self._loop is not None:
            self._watch(self._loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._socket is not None
        loop.add_reader(self._socket.fileno(), self._drain)
        loop.call_soon(self._drain)

    def _unwatch(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._loop is not None and not self._loop.is_closed() and self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())

    def _disconnect(self) -> None:
        self._unwatch()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _lose(self, cause: str) -> None:
        """The engine has died: end all requests."""
        self._disconnect()
        self._death = cause
        self._end_streams(f"the engine has stopped: {cause}")


@dataclass(slots=True)
class _Stream:
    """The receiver of a request's news; `since` is the number of the command that added the request."""

    since: int
    deliver: Deliver
