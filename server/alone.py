"""A service with one HTTP process and one engine process."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType
from typing import TYPE_CHECKING

from engine import EngineConfig
from engine.host.loading import Tell
from engine.host.logs import LogFormat
from server.assembly import assemble
from server.config.settings import ServerSettings
from server.door.keys import KeyRing, read_api_keys
from server.door.listening import Listener
from server.door.loading import answering_while_loading
from server.door.reload import KeyReload
from server.life import end_at_once, say_end

if TYPE_CHECKING:
    from server.lone import LoneServer


def serve_alone(
    config: EngineConfig,
    settings: ServerSettings,
    model_id: str,
    version: str,
    listener: Listener,
    log_format: LogFormat,
) -> int:
    """Load the model and serve until a signal; returns the exit status. Raises OctavoError if the model cannot be
    loaded, or a setting is invalid."""
    with answering_while_loading(listener.socket, settings, model_id) as tell:
        server = _prepare(config, settings, model_id, version, listener, log_format, tell)
    return run_server(server, listener)


def run_server(server: LoneServer, listener: Listener) -> int:
    """Serve until a signal; the exit status."""
    from server.serving import end_soon

    # Handlers for the time before and after uvicorn's own.
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
    tell: Tell,
) -> LoneServer:
    api_keys = KeyRing()
    reload = KeyReload(settings, api_keys)
    reload.listen()  # before the file is read, so that no change is missed
    api_keys.replace(read_api_keys(settings))
    made = assemble(config, settings, model_id, version, log_format, api_keys, tell)
    from server.lone import LoneServer  # in parallel with the app, while the engine loads

    return LoneServer(made.app, made.client, made.drain, listener, model_id, reload, settings)
