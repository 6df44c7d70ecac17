"""A connection between a front and its desk: messages in order, and questions with answers. When one side ends, for
whatever reason, the other side sees the connection close."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Self, cast

from engine.host.frames import framed, take_frames
from server.processes.messages import Body, Frame, decode, encode

# Takes a message; returns its answer, an awaitable for it, or None.
Answerer = Callable[[Body], Body | Awaitable[Body] | None]


class Line(asyncio.Protocol):
    """One side of a connection. Use it from one event loop."""

    def __init__(self, answer: Answerer, lost: Callable[[], None]):
        self._answer = answer  # called with each message that is not an answer, in order. It must not raise.
        self._lost = lost  # called when the connection is closed
        self._unread = bytearray()
        self._asked: dict[int, asyncio.Future[Body]] = {}
        self._number = 0
        self._answering: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def over(cls, connection: socket.socket, answer: Answerer, lost: Callable[[], None]) -> Self:
        """A connection over a connected socket, which it closes."""
        line = cls(answer, lost)
        connection.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: line, sock=connection)
        return line

    def tell(self, body: Body) -> None:
        """Send a message that needs no answer. If the connection is closed, nothing happens."""
        self._send(Frame(0, False, body))

    async def ask(self, body: Body) -> Body:
        """The answer to a question. Raises ConnectionError if the connection is closed."""
        if self._transport is None:
            raise ConnectionError("the line is closed")
        self._number += 1
        number = self._number
        future: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        try:
            self._send(Frame(number, False, body))
            return await future
        finally:
            del self._asked[number]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _send(self, frame: Frame) -> None:
        if self._transport is not None:
            self._transport.write(framed(encode(frame)))

    # ---------------------------------------------------------------- the protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Process all complete messages."""
        self._unread += data
        for message in take_frames(self._unread):
            self._receive(decode(message))

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side has ended."""
        self._transport = None
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionError("the line is closed"))
        self._lost()

    def _receive(self, frame: Frame) -> None:
        if frame.answers:
            future = self._asked.get(frame.number)
            if future is not None and not future.done():
                future.set_result(frame.body)
            return
        answer = self._answer(frame.body)
        if isinstance(answer, Awaitable):
            task = asyncio.ensure_future(self._answer_later(frame.number, answer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif answer is not None:
            self._send(Frame(frame.number, True, answer))

    async def _answer_later(self, number: int, answer: Awaitable[Body]) -> None:
        self._send(Frame(number, True, await answer))
