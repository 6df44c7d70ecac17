"""Accepts connections in place of the event loop's own server, so that each has a slot from its first moment (including
its TLS handshake) and a lack of file descriptors stops nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from server.door.shares import Shares
from server.door.slots import Slot, Slots

logger = logging.getLogger("octavo.server")

_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 0.1  # seconds without accepting, if no connection could be closed
_MOMENT = 0.002  # seconds in which another process may accept


class Acceptor:
    """Listens on a socket, with the interface that uvicorn needs of an asyncio server. `handshake_timeout`: maximum
    seconds of a handshake."""

    def __init__(
        self,
        listener: socket.socket,
        slots: Slots,
        make_protocol: Callable[[Slot], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshake_timeout: float,
    ):
        self._listener = listener
        self._slots = slots  # the connection slots; each connection takes one
        self._make_protocol = make_protocol  # makes the protocol of a connection
        self._tls = tls  # the TLS context, for connections that begin with a handshake
        self._handshake_timeout = handshake_timeout if tls is not None else None
        self._shares = slots.shares
        self._has_waited = False
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    def start(self, backlog: int) -> None:
        """Start to accept; the system queues this many connections."""
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting; idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """Does nothing: there is nothing to wait for."""

    def _accept(self) -> None:
        if self._shares is not None and self._leave_to_others(self._shares):
            return
        # At most as many at a time as the reserve has: a dropped connection is closed before this is called again. Only
        # one if another process may have room.
        for _ in range(self._slots.sizes.reserve if self._shares is None else 1):
            try:
                connection, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as problem:
                if problem.errno not in _NO_FILES:
                    raise
                if not self._slots.make_room():
                    self._wait(problem)
                return
            connection.setblocking(False)
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # uvloop does this itself
            slot = self._slots.open()
            # Only until there is a transport: closing the socket itself would leave the event loop with its descriptor.
            slot.drop = self._loop.create_task(self._hand_over(connection, slot)).cancel

    def _leave_to_others(self, shares: Shares) -> bool:
        """Give a process with fewer connections a moment to take this one."""
        self._has_waited = not self._has_waited and shares.ahead
        if self._has_waited:
            self._rest(_MOMENT)
        return self._has_waited

    def _wait(self, problem: OSError) -> None:
        logger.error("No connection can be accepted: %s. Raise the limit of open files (ulimit -n).", problem.strerror)
        self._rest(_PAUSE)

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._loop.add_reader, self._listener, self._accept)

    async def _hand_over(self, connection: socket.socket, slot: Slot) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(slot),
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_timeout,
            )
        except (OSError, asyncio.CancelledError) as problem:  # the client left, did not use TLS, or was dropped
            logger.debug("A connection ended before its first request: %r", problem)
            connection.close()
            slot.close()
