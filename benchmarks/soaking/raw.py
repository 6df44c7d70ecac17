"""A connection whose bytes are the client's own affair: what is no HTTP, what comes slowly, what is read slowly."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

import httptools
from load.client import Target

from soaking.answers import Answer


class RawConnection:
    """One connection for one request; a context.

    Args:
        receive_buffer: of the kernel, in bytes; None: its own choice.

    Attributes:
        complete: the answer has come whole.
        lost: the server has closed or reset the connection.
    """

    def __init__(self, target: Target, answer: Answer, receive_buffer: int | None = None):
        self._target = target
        self._answer = answer
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._parser = httptools.HttpResponseParser(self)
        self._type = ""
        self.complete = self.lost = False

    async def __aenter__(self) -> Self:
        try:
            await asyncio.get_running_loop().sock_connect(self._socket, (self._target.host, self._target.port))
        except OSError:
            self._socket.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    async def send(self, pieces: Iterable[bytes], pause: float = 0.0) -> None:
        """Send these, with a pause in seconds after each, until all are sent or an answer has come."""
        loop = asyncio.get_running_loop()
        hearing: asyncio.Task[None] | None = None  # goes on over a pause's end: cancelled, it could lose what it has
        try:
            for piece in pieces:
                try:
                    await loop.sock_sendall(self._socket, piece)
                except OSError:
                    break  # the server has heard enough; what it said is there to be read
                if pause:
                    hearing = hearing or asyncio.create_task(self.receive(1 << 16))
                    done, _ = await asyncio.wait({hearing}, timeout=pause)
                    if done:
                        hearing.result()
                        hearing = None
                if self.complete or self.lost:
                    break
            if hearing is not None:
                await hearing
        finally:
            if hearing is not None:
                hearing.cancel()

    async def receive(self, size: int) -> None:
        """Take some bytes of the answer."""
        try:
            data = await asyncio.get_running_loop().sock_recv(self._socket, size)
        except OSError:
            data = b""
        if not data:
            self.lost = True
            return
        self._parser.feed_data(data)

    async def receive_all(self, size: int = 1 << 16, pause: float = 0.0) -> None:
        """Take all of the answer, with a pause in seconds after each piece, until it is complete or lost."""
        while not (self.complete or self.lost):
            await self.receive(size)
            await asyncio.sleep(pause)

    # ------------------------------------------------------------ called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer.on_head(self._parser.get_status_code(), self._type)

    def on_body(self, body: bytes) -> None:
        self._answer.on_data(body, time.perf_counter())

    def on_message_complete(self) -> None:
        self.complete = True
