"""The client of an engine that another process runs: that process reports when the engine dies and when it serves
again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.interface.outputs import EngineInfo, EngineStats
from engine.process.connection import ConnectedClient


class AttachedEngineClient(ConnectedClient):
    """Dead until `serves` is called.

    Args:
        name: this client's name at the engine; after a client has been dismissed, its name is ignored.
        give_up: reports why the engine should be treated as dead.
    """

    def __init__(self, name: bytes, give_up: Callable[[str], None]):
        super().__init__(name)
        self._give_up = give_up
        self._death = "it has not been started"

    def serves(self, address: str, info: EngineInfo, stats: EngineStats, num_restarts: int) -> None:
        """The engine has become ready. Called on the event loop.

        Args:
            address: the engine's ZeroMQ address.
            info: the engine's facts.
            stats: the engine's current counters.
            num_restarts: how often the engine has been started again.
        """
        self._attach()
        self._disconnect()
        self.num_restarts = num_restarts
        self._connect(address, info, stats)

    def dies(self, cause: str) -> None:
        """Record that the engine has died: results that it had sent are delivered, and all requests end."""
        while self._deliver_some():
            pass
        self._lose(cause)

    def give_up(self, cause: str) -> None:
        if self.is_alive:
            self._give_up(cause)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._disconnect()
            self._end_streams("the engine is shut down")
            self._context.term()

    def _attach(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._unwatch()
            self._loop = loop
            if self._socket is not None:
                self._watch(loop)

    def _died(self, cause: str) -> None:
        self._give_up(cause)
