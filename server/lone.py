"""The server of a service with one HTTP process."""

from __future__ import annotations

import logging
from functools import partial
from types import FrameType

from fastapi import FastAPI

from engine.process.client import EngineClient
from server.config.settings import ServerSettings
from server.door.drain import Drain
from server.door.listening import Listener
from server.door.reload import KeyReload
from server.door.slots import Slots
from server.life import announcement, end_at_second_signal, tell_when_unreachable
from server.serving import Server, uvicorn_config
from server.watchdog import STUCK, restart_when_stuck

logger = logging.getLogger("octavo.server")


class LoneServer(Server):
    """A server that is the whole service except for the engine. `failure`: the reason if the engine was abandoned."""

    def __init__(
        self,
        app: FastAPI,
        client: EngineClient,
        drain: Drain,
        listener: Listener,
        model_id: str,
        reload: KeyReload,
        settings: ServerSettings,
    ):
        metrics = app.state.service.metrics
        slots = Slots(settings.root_path, metrics.rejected, metrics.connection_dropped)
        metrics.exposition.show_connections(lambda: slots.num_open)
        super().__init__(
            uvicorn_config(app, settings),
            settings,
            drain,
            slots,
            watches=(
                self._stop_on_failure,
                partial(restart_when_stuck, client, STUCK * settings.liveness_timeout),
                reload.run,
                partial(tell_when_unreachable, listener, drain),
            ),
            listening=partial(logger.info, announcement(settings, listener, model_id)),
        )
        self._client = client
        self._listener = listener
        self.failure: str | None = None

    async def _stop_on_failure(self) -> None:
        self.failure = await self._client.wait_failed()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            end_at_second_signal(self._listener)  # do not wait for the engine's step or for a client
        self.stop()
