"""Additions to uvicorn's connections: bounded write buffers, and disconnection of clients that read nothing.

If a client does not read, the kernel's buffer fills, then the transport's, then `send` waits. This module keeps both
buffers small, so that `send` waits early and little memory is used. A client that then reads nothing for too long loses
its connection, which ends the request as any disconnect does.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
import time
from collections.abc import Set
from typing import Any, cast

from starlette.types import Scope

from server.door.drain import Drain

logger = logging.getLogger("octavo.server")

# Bytes that the kernel buffers for one client, beyond those in transit.
_UNSENT_IN_KERNEL = 128 * 1024
# In Linux's struct tcp_info (linux/tcp.h): tcpi_bytes_acked, a 64-bit number after 104 bytes of smaller numbers and two
# pacing rates.
_BYTES_ACKED = 120
_TCP_INFO_BYTES = 128
_KEY = "octavo_connection"
LAST_WORDS = 1.0  # seconds for the end of interrupted answers


def unsent(transport: asyncio.Transport) -> int:
    """Bytes that this process has not sent yet on a connection, and bytes that the client's system has not
    acknowledged."""
    num_in_kernel = 0
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
            num_in_kernel = int(struct.unpack("i", answer)[0])
    # asyncio's TLS counts bytes that are not encrypted yet, but not those passed to the transport below.
    below = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    num_encrypted = 0 if below is None else int(below.get_write_buffer_size())
    return transport.get_write_buffer_size() + num_encrypted + num_in_kernel


class Connection:
    """A client's connection, as a request's scope contains it. `stalled`: whether it was closed because the client read
    nothing for too long."""

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self._socket: socket.socket | None = transport.get_extra_info("socket")
        self.stalled = False

    def bound_buffers(self) -> None:
        """Limit the data that is buffered for the client. The transport may call `pause_writing` at once."""
        if self._socket is not None and self._socket.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError, AttributeError):  # a system without this option buffers more
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_IN_KERNEL)
        # `send` waits for every byte that the kernel does not take at once. (Not 0: asyncio's TLS would never resume.)
        self._transport.set_write_buffer_limits(high=1, low=0)

    def progress(self) -> int:
        """A number that grows whenever the client (strictly, its kernel) receives data."""
        if self._socket is not None:
            with contextlib.suppress(OSError, AttributeError, struct.error):
                facts = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                return int(struct.unpack_from("Q", facts, _BYTES_ACKED)[0])
        # Without TCP, or on a system that does not report it: the bytes that this process still has to send.
        return -unsent(self._transport)

    def stall(self) -> None:
        """Close it at once, because the client reads nothing."""
        self.stalled = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # reset it, so that the kernel drops unread data
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def is_stalled(scope: Scope) -> bool:
    """Whether the request's connection was closed because its client read nothing."""
    connection = scope.get("state", {}).get(_KEY)
    return isinstance(connection, Connection) and connection.stalled


class WatchedProtocol(asyncio.Protocol):
    """Mixin before one of uvicorn's HTTP protocols."""

    stall_timeout: float  # seconds without a received byte, while there are bytes to receive, that end a connection
    app_state: dict[str, Any]  # uvicorn's state, which is copied into each request's scope
    _connection: Connection
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Bound the buffers."""
        super().connection_made(transport)
        self._connection = Connection(cast(asyncio.Transport, transport))
        self.app_state = {**self.app_state, _KEY: self._connection}
        self._connection.bound_buffers()

    def pause_writing(self) -> None:
        """The client is slower than the answer: watch it."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._unwatch()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        progress = self._connection.progress()
        self._timer = asyncio.get_running_loop().call_later(self.stall_timeout, self._check, progress)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, progress: int) -> None:
        if self._connection.progress() > progress:
            self._watch()  # slow, but alive
        else:
            logger.warning(
                "A client did not read for %g seconds (stream_stall_timeout); its connection was closed.",
                self.stall_timeout,
            )
            self._connection.stall()


async def drain_connections(drain: Drain, connections: Set[Any], seconds: float) -> None:
    """Let running requests finish; after this many seconds end them, with an error if the client still reads."""
    drain.begin()
    if await drain.wait_idle(seconds):
        return
    logger.warning(
        "%d requests did not finish within %g seconds (shutdown_timeout) and were cancelled.",
        drain.num_running,
        seconds,
    )
    drain.interrupt()
    if not await drain.wait_idle(LAST_WORDS):
        for connection in list(connections):
            connection.transport.abort()
        await drain.wait_idle(LAST_WORDS)


async def close_connections(connections: Set[Any], seconds: float) -> None:
    """Close all connections. Data that is already written may still arrive within this many seconds."""
    for connection in list(connections):
        connection.shutdown()
    began = time.monotonic()
    while connections and time.monotonic() < began + seconds:
        # TLS waits for the client's close message, which may never come.
        unsent = any(connection.transport.get_write_buffer_size() for connection in connections)
        if not unsent and time.monotonic() > began + LAST_WORDS:
            break
        await asyncio.sleep(0.02)
    for connection in list(connections):
        connection.transport.abort()
