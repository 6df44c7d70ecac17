"""A process that answers HTTP: uvicorn with the service's protocol and middleware, from its first connection to its
last."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.loops.auto import auto_loop_factory

from server.config.settings import ServerSettings
from server.door.accepting import Acceptor
from server.door.connection import LAST_WORDS, close_connections, drain_connections
from server.door.drain import Drain
from server.door.protocol import HEAD_TIMEOUT, http_protocol
from server.door.root_path import RootPath
from server.door.slots import FEW, Slot, Slots, count_slots
from server.watchdog import LoopWatchdog

if TYPE_CHECKING:
    from fastapi import FastAPI

KEEP_ALIVE = 75  # seconds; longer than clients and gateways keep an idle connection, so that they close it first

logger = logging.getLogger("octavo.server")


def uvicorn_config(app: FastAPI, settings: ServerSettings) -> uvicorn.Config:
    """uvicorn with the service's protocol and logs, on uvloop if available, without websockets."""
    return uvicorn.Config(
        RootPath(app, settings.root_path),
        http=http_protocol(settings),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_keyfile_password=settings.ssl_keyfile_password,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=settings.shutdown_timeout,
    )


class Server(uvicorn.Server):
    """A uvicorn server that reports when it listens and answers requests while it drains.

    Args:
        config: the result of `uvicorn_config`.
        settings: the service's settings.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        settings: ServerSettings,
        drain: Drain,
        slots: Slots,
        watches: Sequence[Callable[[], Coroutine[Any, Any, None]]],
        listening: Callable[[], None],
    ):
        super().__init__(config)
        self._drain = drain  # notified when it stops
        self._slots = slots  # the connection slots
        self._max_connections = settings.max_connections
        self._watchdog = LoopWatchdog(settings.loop_timeout)
        self._to_watch = watches  # tasks that run from its start to its end
        self._listening = listening  # called once it listens
        self._watches: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        # These objects stay: a full garbage collection over them would delay every stream.
        gc.collect()
        gc.freeze()
        self._watchdog.start()
        self._watches = [asyncio.create_task(watch()) for watch in self._to_watch]
        self._slots.sizes = count_slots(self._max_connections)
        self._slots.shared = self._max_connections is not None
        self._say_slots()
        for listener in sockets or []:
            acceptor = Acceptor(listener, self._slots, self._make_protocol, self.config.ssl, HEAD_TIMEOUT)
            acceptor.start(self.config.backlog)
            self.servers.append(cast("asyncio.base_events.Server", acceptor))
        self._listening()

    def _make_protocol(self, slot: Slot) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state, slot=slot)

    def _say_slots(self) -> None:
        sizes, wanted = self._slots.sizes, self._max_connections
        limit = "The limit on open files (ulimit -n) allows %d connections at a time"
        if wanted is not None and wanted > sizes.fitting:
            logger.warning(f"{limit}, not for max_connections (%d).", sizes.fitting, wanted)
        elif wanted is None and sizes.fitting < FEW:
            logger.warning(f"{limit}; beyond that, only health and metrics are answered.", sizes.fitting)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        limit = float(self.config.timeout_graceful_shutdown or 0)
        deadline = time.monotonic() + limit
        running = self._drain.num_running
        patience = f" {running} running requests get up to {limit:g} seconds." if running else ""
        logger.info("Stopping.%s A second signal stops immediately.", patience)
        await drain_connections(self._drain, self.server_state.connections, limit)
        # Nothing runs any more; only the listening sockets and bytes in transit remain.
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        await close_connections(self.server_state.connections, max(deadline - time.monotonic(), LAST_WORDS))
        self.config.timeout_graceful_shutdown = 1
        await super().shutdown(sockets)
        self._watchdog.stop()

    def stop(self) -> None:
        """Refuse new requests, and end once the running ones have ended. Safe in a signal handler."""
        self._drain.begin()
        self.should_exit = True


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes event loops like uvicorn's."""
    return auto_loop_factory(use_subprocess=False)


def end_soon(end: Callable[[], object]) -> None:
    """End the process; everything is closed by now. Threads may still compute unneeded results, such as a long text's
    tokens; they get a moment."""
    timer = threading.Timer(LAST_WORDS, end)
    timer.daemon = True
    timer.start()
