"""The work of a replica besides answering: loading, watching its engine, and reporting its health."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Coroutine
from importlib import metadata
from typing import Any

from starlette.types import ASGIApp

from engine import EngineConfig, default_topic
from server import logs
from server.assembly import Assembly, assemble
from server.config.settings import ServerSettings
from server.context import Service
from server.door.keys import KeyRing, read_api_keys
from server.door.rates import check_storage
from server.facts import served_model_id
from server.replicas.carried import CarriedByServe
from server.watchdog import STUCK, restart_when_stuck

logger = logging.getLogger("octavo.server")


class UnhealthyError(Exception):
    """The replica should be replaced."""


class Replica:
    """A service whose HTTP server is another process.

    Args:
        made: the service. The running event loop drives its client from now on.
        settings: the service's settings.
    """

    def __init__(self, made: Assembly, settings: ServerSettings):
        self.app: ASGIApp = CarriedByServe(made.app)
        self._client = made.client
        self._service: Service = made.app.state.service
        self._settings = settings
        self._failure: str | None = None
        self._watches = [self._watch(self._follow()), self._watch(self._restart_when_stuck())]

    @classmethod
    async def load(cls, config: EngineConfig, settings: ServerSettings) -> Replica:
        """A replica that is ready to serve. Raises OctavoError if the model cannot be loaded, or a setting is
        invalid."""
        log_format = logs.choose_format(settings.log_format)
        logs.configure(settings.log_level, log_format, log_prompts=settings.log_prompts)
        check_storage(settings.rate_limit_storage)
        model_id = served_model_id(config.model, settings.served_model_name)
        config = config.with_kv_topic(default_topic(model_id, None, os.environ))
        api_keys = KeyRing(read_api_keys(settings))
        version = metadata.version("octavo")
        # In a thread, because Serve checks whether the event loop responds.
        made = await asyncio.to_thread(assemble, config, settings, model_id, version, log_format, api_keys)
        gc.collect()
        gc.freeze()  # as our own server does: a garbage collection over these objects would delay every stream
        return cls(made, settings)

    def check(self) -> None:
        """Check the replica's health. Raises UnhealthyError if the engine was abandoned, or has work and makes no
        progress."""
        if self._failure is not None:
            raise UnhealthyError(f"the engine keeps failing: {self._failure}")
        progress, limit = self._client.progress, self._settings.liveness_timeout
        if not progress.idle and progress.seconds > limit:
            raise UnhealthyError(
                f"the engine has made no progress for {progress.seconds:.0f} seconds; the limit is {limit:g} "
                "(liveness_timeout)"
            )

    def num_waiting(self) -> int:
        """Requests that wait for rows or pages, or for their turn at the engine."""
        waiting = self._service.turns.num_waiting
        return waiting + self._client.stats().num_waiting if self._client.is_alive else waiting

    def stop(self) -> None:
        """Stop watching the engine; the app's lifespan closes it."""
        for watch in self._watches:
            watch.cancel()

    def _watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    async def _follow(self) -> None:
        self._failure = await self._client.wait_failed()

    async def _restart_when_stuck(self) -> None:
        await restart_when_stuck(self._client, STUCK * self._settings.liveness_timeout)
