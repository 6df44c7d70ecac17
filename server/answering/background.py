"""Answers that do not depend on their client's connection: `background` of /v1/responses. They wait for room in the
service.

The process that makes such an answer holds the events of its stream and writes them to the store a few times a second.
Clients of the same process follow the events here, clients of other processes in the store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from pydantic_core import from_json, to_json
from starlette.types import Message

from engine import EngineDeadError
from server.admission import OVERLOADED
from server.answering.streaming import COMMENT, Wanted
from server.answering.terms import DeadlineError, Terms
from server.context import Service
from server.errors import ApiError, to_api_error
from server.gates import Reservation
from server.response_store import ResponseStore

_WRITE_INTERVAL = 0.25  # seconds between two writes of new events
_LOOK_INTERVAL = 0.25  # seconds between two checks for events that another process has written
_TRY_INTERVAL = 0.1  # seconds between two attempts to get room


class Background:
    """The events of an answer that does not depend on its client."""

    def __init__(
        self,
        service: Service,
        events: AsyncGenerator[str, None],
        streamed: bool,
        keep: Callable[[int], Coroutine[Any, Any, bool]],
        failing: Callable[[ApiError], str],
        interrupted: Callable[[str], None],
    ):
        self.events: list[str] = []  # all events so far, indexed by number
        self.done = False  # whether there will be no more events
        self._service = service  # the service that makes the answer
        # the answer as lists of events; the first list comes once the engine has accepted the request
        self._source = events
        self._streamed = streamed  # clients may follow the events; otherwise only their number is kept
        # writes the events from that number on to the store; returns whether this succeeded. It is first called when
        # the engine has accepted the request, and last when the answer has ended.
        self._keep = keep
        self._failing = failing  # makes the last events for an error
        self._interrupted = interrupted  # called with the reason if the answer was abandoned
        self._written = 0
        self._changed = asyncio.Event()
        self._accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, ended: Callable[[], None]) -> None:
        """Begin the answer; returns when the engine has accepted the request and the store has it. `ended`: called when
        everything is done. Raises ApiError, OctavoError, StoreError if the request is refused or cannot be stored."""
        task = asyncio.create_task(self._make())
        task.add_done_callback(lambda _: ended())
        await asyncio.shield(self._accepted)

    async def changed(self) -> None:
        """Wait until there are new events or the answer has ended."""
        await self._changed.wait()

    async def _make(self) -> None:
        wanted = Wanted(self._service.drain, self._interrupted)
        try:
            with self._service.drain.running(), self._service.using():
                try:
                    await wanted.run({}, _nothing, self._take_all())
                except Exception as problem:
                    if not self._accepted.done():
                        self._accepted.set_exception(problem)
                        return
                    self._take(self._failing(to_api_error(problem)))
                await self._write()
        finally:
            self.done = True
            self._tell()

    async def _take_all(self) -> None:
        wrote = float("-inf")
        async with aclosing(self._source) as source:
            async for item in source:
                self._take(item)
                if not self._accepted.done():
                    await self._write()
                    self._accepted.set_result(None)
                elif time.monotonic() - wrote >= _WRITE_INTERVAL:
                    await self._write()
                    wrote = time.monotonic()

    def _take(self, item: str) -> None:
        events = [event for event in item.split("\n\n")[:-1] if not event.startswith(":")]
        self.events += [f"{event}\n\n" if self._streamed else "" for event in events]
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _write(self) -> None:
        count = len(self.events)
        if self._written < count and await self._keep(self._written):
            self._written = count


class Patience:
    """The wait of one request for room in the service. At most two waiting responses ask for room at a time,
    round-robin over tenants. `terms`: the request's terms; the deadline ends the wait."""

    def __init__(self, service: Service, terms: Terms):
        self._service = service
        self._terms = terms
        self._given_up = False
        self._waiting: asyncio.Timeout | None = None

    async def reservation(self, admit: Callable[[], Awaitable[Reservation]]) -> Reservation | None:
        """The request's slots, once there is room; None if the wait was abandoned. Raises ApiError if there will be no
        room, or none before the deadline."""
        if self._given_up:
            return None
        try:
            async with asyncio.timeout(self._terms.seconds_left) as self._waiting:
                async with self._service.queueing.of(self._terms.tenant):
                    while True:
                        try:
                            return await admit()
                        except EngineDeadError:  # another request may ask
                            pass
                        except ApiError as problem:
                            if problem.code != OVERLOADED:
                                raise
                        await asyncio.sleep(_TRY_INTERVAL)
        except TimeoutError:
            if self._given_up:
                return None
            raise DeadlineError from None
        finally:
            self._waiting = None

    def give_up(self) -> None:
        """End the wait."""
        self._given_up = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())


async def _nothing() -> Message:
    """Does nothing, because there is no client that could leave."""
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


async def follow(service: Service, id_: str, tenant: str | None, after: int) -> AsyncGenerator[str, None]:
    """The events of an answer after this number, to the end, whichever process makes them. The last event is always
    sent with a higher number than the client's: a client may have seen higher numbers than the store has, if the
    process that made the answer was killed. `id_`: the id of an answer whose stream is kept."""
    store, made = service.response_store, service.background.get(id_)
    assert store is not None
    yield ""  # errors no longer matter
    keepalive = service.settings.stream_keepalive or None
    sent, silent, told = after + 1, time.monotonic(), False
    while True:
        events, last = (
            (made.events[sent:], made.done) if made is not None else await _stored(store, id_, tenant, sent - 1)
        )
        if last and not (events or told):
            events = (made.events if made is not None else (await _stored(store, id_, tenant, -1))[0])[-1:]
            events = [_numbered(event, sent) for event in events]
        if events:
            sent, silent, told = sent + len(events), time.monotonic(), True
            yield "".join(events)
        elif last:
            return
        elif keepalive is not None and time.monotonic() - silent >= keepalive:
            silent = time.monotonic()
            yield COMMENT
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(keepalive):
                    await (made.changed() if made is not None else asyncio.sleep(_LOOK_INTERVAL))


def _numbered(event: str, number: int) -> str:
    name, data = event.split("data: ", 1)
    return f"{name}data: {to_json(from_json(data) | {'sequence_number': number}).decode()}\n\n"


async def _stored(store: ResponseStore, id_: str, tenant: str | None, after: int) -> tuple[list[str], bool]:
    found = await store.events(id_, tenant, after)
    return ([], True) if found is None else found
