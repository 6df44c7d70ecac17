"""A process that answers HTTP beside others: `python -m server.processes.front`, started by `server.processes.service`,
with a connection to its desk as standard input.

It ends when the connection closes. The desk's process handles signals.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry
from pydantic_core import to_json

from engine import OctavoError
from engine.host.children import leave_signals_to_parent, take_standard_input
from engine.process.client import AttachedEngineClient
from server import logs
from server.app import create_app
from server.commons import gate_of_lines
from server.config.settings import ServerSettings
from server.context import Service
from server.door.drain import Drain
from server.door.keys import KeyRing, read_api_keys
from server.door.listening import raise_file_limit
from server.door.reload import KeyReload
from server.door.shares import Shares
from server.door.slots import Slots
from server.facts import log_facts, read_tokenizer
from server.memory import MemoryGuard, find_limit
from server.metrics.requests import RequestMetrics
from server.processes.line import Line
from server.processes.messages import (
    Begin,
    Body,
    CancelHere,
    Cancelled,
    Count,
    Counted,
    EngineDied,
    EngineServes,
    FrontFailed,
    FrontReady,
    GiveUp,
    ReloadKeys,
    Stop,
)
from server.processes.remote import Steps, follow_news, remote_commons
from server.serving import Server, end_soon, loop_factory, uvicorn_config
from server.watchdog import STUCK, restart_when_stuck
from server.workers.pool import shared_workers

logger = logging.getLogger("octavo.server")


class _Server(Server):
    """A server that leaves signals to the desk's process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Front:
    """Handles the desk's messages in the front."""

    def __init__(self) -> None:
        self._begin: asyncio.Future[Begin] = asyncio.get_running_loop().create_future()
        self._line: Line | None = None
        self._client: AttachedEngineClient | None = None
        self._engine: EngineServes | EngineDied | None = None  # the last known state
        self._reload: KeyReload | None = None
        self._server: Server | None = None
        self._service: Service | None = None
        self._slots: Slots | None = None
        self._stopping = self._done = False

    async def run(self, connection: socket.socket) -> None:
        """Serve until told to stop."""
        self._line = await Line.over(connection, self._answer, self._lost)
        begin = await self._begin
        try:
            self._server = self._prepare(begin, self._line)
        except OctavoError as problem:
            self._line.tell(FrontFailed(str(problem)))
        else:
            if not self._stopping:
                await self._server.serve(sockets=[socket.socket(fileno=begin.listener)])
        self._done = True
        self._line.close()

    def _prepare(self, begin: Begin, line: Line) -> Server:
        """Do everything that comes before the first connection. Raises OctavoError if a setting is invalid, or the
        tokenizer cannot be loaded."""
        settings = ServerSettings.model_validate_json(begin.settings)
        logs.configure(settings.log_level, begin.log_format, log_prompts=settings.log_prompts)
        raise_file_limit()
        client = self._client = AttachedEngineClient(begin.name, lambda cause: line.tell(GiveUp(cause)))
        client.info = begin.engine.info
        self._follow_engine()
        tokenizer = read_tokenizer(begin.config, client.info)
        if begin.tell_facts:
            log_facts(client.info, tokenizer, begin.model_id)
        if tokenizer is not None and tokenizer.chat_template is not None:
            shared_workers().start()
        keys = KeyRing(read_api_keys(settings))
        self._reload = KeyReload(settings, keys)
        metrics, steps, drain = RequestMetrics(client.info, CollectorRegistry()), Steps(), Drain()
        client.on_news = follow_news(metrics, steps)
        app = create_app(
            client,
            tokenizer,
            begin.model_id,
            version=begin.version,
            settings=settings,
            drain=drain,
            api_keys=keys,
            memory=MemoryGuard(find_limit(settings.max_api_memory, begin.num_fronts)),
            commons=remote_commons(line, metrics, steps, begin.num_fronts, gate_of_lines(client.info, settings)),
            created=begin.created,
        )
        self._service = app.state.service
        shares = Shares(Path(begin.shares), begin.place)
        shares.show(0)  # a predecessor may have had some
        self._slots = Slots(settings.root_path, metrics.rejected, metrics.connection_dropped, shares)
        return _Server(
            uvicorn_config(app, settings),
            settings,
            drain,
            self._slots,
            watches=(partial(restart_when_stuck, client, STUCK * settings.liveness_timeout), self._reload.run),
            listening=partial(line.tell, FrontReady()),
        )

    def _answer(self, body: Body) -> Body | None:
        match body:
            case Begin():
                self._engine = body.engine
                self._begin.set_result(body)
            case EngineServes() | EngineDied():
                self._engine = body
                self._follow_engine()
            case Stop():
                self._stopping = True
                if self._server is not None:
                    self._server.stop()
            case ReloadKeys():
                if self._reload is not None:
                    self._reload.hear()
            case Count():
                return self._count()
            case CancelHere(response_id, tenant):
                return Cancelled(self._cancel(response_id, tenant))
        return None

    def _follow_engine(self) -> None:
        if self._client is None:  # it will, once there is an engine
            return
        match self._engine:
            case EngineServes(address, info, stats, num_restarts):
                self._client.serves(address, info, stats, num_restarts)
            case EngineDied(cause):
                self._client.dies(cause)

    def _count(self) -> Counted:
        if self._service is None or self._slots is None:
            return Counted(0, 0)
        return Counted(self._slots.num_open, self._service.turns.num_waiting)

    def _cancel(self, response_id: str, tenant: str | None) -> bytes | None:
        running = None if self._service is None else self._service.running_responses.get(response_id)
        if running is None or running.terms.tenant != tenant:
            return None
        return to_json(running.cancel())

    def _lost(self) -> None:
        if not self._done:
            os._exit(1)  # the desk's process has ended, and with it the engine


async def _serve(connection: socket.socket) -> None:
    await Front().run(connection)


def main() -> None:
    """Serve with the settings in the first message."""
    leave_signals_to_parent()
    connection = take_standard_input()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(connection))
        end_soon(partial(os._exit, 0))


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)
