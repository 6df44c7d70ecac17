"""A service that is one process beside its engine's."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from types import FrameType

from engine import EngineConfig
from engine.host.logs import LogFormat
from server.assembly import Assembly, assemble
from server.config.settings import ServerSettings
from server.door.keys import KeyRing, read_api_keys
from server.door.listening import Listener
from server.door.loading import answering_while_loading
from server.door.reload import KeyReload
from server.door.slots import Slots
from server.life import announcement, end_at_once, end_at_second_signal, say_end, tell_when_unreachable
from server.serving import Server, end_soon, uvicorn_config
from server.watchdog import STUCK, restart_when_stuck

logger = logging.getLogger("octavo.server")


def serve_alone(
    config: EngineConfig,
    settings: ServerSettings,
    model_id: str,
    version: str,
    listener: Listener,
    log_format: LogFormat,
) -> int:
    """Load the model, and serve until a signal; the exit status.

    Raises:
        OctavoError: the model cannot be loaded, or a setting is wrong.
    """
    with answering_while_loading(listener.socket, settings, model_id):
        server = _prepare(config, settings, model_id, version, listener, log_format)
    return _run(server, listener)


def _run(server: _Server, listener: Listener) -> int:
    # For the moments before uvicorn's own handlers stand, and after them.
    def stop(signum: int, frame: FrameType | None) -> None:
        server.should_exit = True

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(server.serve(sockets=[listener.socket]))
        status = say_end(server.failure)
        end_soon(lambda: end_at_once(status, listener))
    return status


def _prepare(
    config: EngineConfig,
    settings: ServerSettings,
    model_id: str,
    version: str,
    listener: Listener,
    log_format: LogFormat,
) -> _Server:
    api_keys = KeyRing()
    reload = KeyReload(settings, api_keys)
    reload.listen()  # before the file is read, so that no change of it is missed
    api_keys.replace(read_api_keys(settings))
    made = assemble(config, settings, model_id, version, log_format, api_keys)
    metrics = made.app.state.service.metrics
    slots = Slots(settings.root_path, metrics.rejected, metrics.connection_dropped)
    metrics.exposition.show_connections(lambda: slots.num_open)
    return _Server(made, listener, announcement(settings, listener, model_id), reload, settings, slots)


class _Server(Server):
    """One that is the whole service, but for its engine.

    Attributes:
        failure: why the engine was given up, if it was.
    """

    def __init__(
        self,
        made: Assembly,
        listener: Listener,
        announce: str,
        reload: KeyReload,
        settings: ServerSettings,
        slots: Slots,
    ):
        super().__init__(
            uvicorn_config(made.app, settings),
            settings,
            made.drain,
            slots,
            watches=(
                self._stop_on_failure,
                partial(restart_when_stuck, made.client, STUCK * settings.liveness_timeout),
                reload.run,
                partial(tell_when_unreachable, listener, made.drain),
            ),
            listening=partial(logger.info, announce),
        )
        self._client = made.client
        self._listener = listener
        self.failure: str | None = None

    async def _stop_on_failure(self) -> None:
        self.failure = await self._client.wait_failed()
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            end_at_second_signal(self._listener)  # neither the engine's step nor a client is waited for
        self.stop()
