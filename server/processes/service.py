"""A service with several processes that answer HTTP (fronts), beside one engine. This process starts the fronts on one
socket, replaces those that end, and keeps the shared counts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.multiprocess import MultiProcessCollector

from engine import ConfigError, EngineConfig, OctavoError
from engine.host.children import start_child
from engine.host.logs import LogFormat
from engine.process.client import ProcessEngineClient
from server.commons import Admissions
from server.config.settings import ServerSettings
from server.door.connection import LAST_WORDS
from server.door.drain import Drain
from server.door.key_counts import KeyCounts
from server.door.keys import read_api_keys
from server.door.listening import Listener
from server.door.loading import answering_while_loading
from server.door.rates import RequestRates
from server.door.reload import NO_FILE
from server.door.shares import Shares
from server.early import ask_known
from server.life import announcement, end_at_second_signal, load, say_end, tell_when_unreachable
from server.metrics.exposition import Exposition
from server.metrics.processes import ProcessUse
from server.processes.desk import Counts, Desk
from server.processes.line import Line
from server.processes.messages import (
    Begin,
    Body,
    CancelElsewhere,
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
    Render,
    RenderedMetrics,
    Stop,
)
from server.serving import loop_factory
from server.watchdog import STUCK, LoopWatchdog, restart_when_stuck
from server.workers.pool import WorkerPool

logger = logging.getLogger("octavo.server")

_PATIENCE = 1.0  # seconds for a front to report its counts
_GRACE = 2.0  # seconds to end after its connection is closed
_FIRST_DELAY, _MAX_DELAY = 0.5, 30.0  # seconds before a front that could not start is started again


def serve_several(
    config: EngineConfig,
    settings: ServerSettings,
    model_id: str,
    version: str,
    listener: Listener,
    log_format: LogFormat,
) -> int:
    """Load the model and serve until a signal; returns the exit status. Raises OctavoError if the model cannot be
    loaded, or a setting is invalid."""
    read_api_keys(settings)  # reports invalid keys before the model loads
    workers = WorkerPool()
    try:
        with answering_while_loading(listener.socket, settings, model_id) as tell:
            known = partial(ask_known, config, workers)
            client = load(config, settings, log_format, known, tell)  # fronts read tokenizers
    finally:
        workers.close()
    folder = client.folder / "metrics"
    folder.mkdir()
    begin = Begin(
        name=b"",
        settings=settings.model_dump_json(include=set(ServerSettings.model_fields)),
        config=config,
        version=version,
        model_id=model_id,
        created=int(time.time()),
        listener=listener.socket.fileno(),
        log_format=log_format,
        place=0,
        num_fronts=settings.api_server_count,
        shares=str(folder / "connections"),
        engine=_state(client),
        tell_facts=False,
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        failure = runner.run(_Service(client, settings, listener, begin, folder).run())
    return say_end(failure)


def _state(client: ProcessEngineClient) -> EngineServes:
    return EngineServes(client.address, client.info, client.stats(), client.num_restarts)


@dataclass(eq=False, slots=True)
class _Front:
    place: int  # the front's index; a replacement has the same index
    name: bytes  # the front's name among the engine's clients
    process: subprocess.Popen[bytes]
    desk: Desk
    # the connection; None until it is open and the first message is sent, which comes before all others
    line: Line | None = None
    # done once it listens
    ready: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    counted: Counted = field(default_factory=lambda: Counted(0, 0))  # its last reported counts

    def listening(self) -> Line | None:
        """The front's connection, once it answers; while the front starts, a question would wait."""
        return self.line if self.ready.done() else None


class _Service:
    def __init__(
        self, client: ProcessEngineClient, settings: ServerSettings, listener: Listener, begin: Begin, folder: Path
    ):
        self._client = client
        self._settings = settings
        self._listener = listener
        self._begin = begin  # a front's first message, except for its name
        self._folder = folder  # the folder of the fronts' metrics; a front's metrics remain when it ends
        Shares.make(Path(begin.shares), begin.num_fronts)
        self._rates = RequestRates(settings.rate_limit_storage)
        self._counts = Counts(lambda refuse: Admissions.of(client, settings, refuse), KeyCounts(self._rates))
        self._fronts: dict[int, _Front] = {}  # by index
        self._num_started = 0
        self._num_failures = 0  # starts in a row
        self._burials: set[asyncio.Task[None]] = set()
        self._drain = Drain()
        self._over: asyncio.Future[str | None] | None = None
        registry = CollectorRegistry()
        counted = MultiProcessCollector(registry, str(folder))  # type: ignore[no-untyped-call]
        self._exposition = Exposition(client, begin.model_id, begin.version, [counted], registry)
        self._show(registry)
        client.on_news = lambda deltas, stats: self._exposition.engine.follow(stats)
        client.on_change = self._tell_engine

    def _show(self, registry: CollectorRegistry) -> None:
        self._exposition.show_admission(self._counts.admissions.generating, self._counts.admissions.pooling)
        self._exposition.show_connections(lambda: sum(front.counted.connections for front in self._fronts.values()))
        self._exposition.engine.also_waiting = lambda: sum(
            front.counted.inputs_waiting for front in self._fronts.values()
        )
        self._replaced = Counter(
            "octavo_http_process_failures", "Processes answering HTTP that ended and were replaced.", registry=registry
        )
        self._lost_prompts = Counter(
            "octavo_prompts_lost",
            "Prompts whose answers were lost with a process that answered HTTP.",
            registry=registry,
        )
        registry.register(ProcessUse(self._processes))

    def _processes(self) -> dict[str, int]:
        fronts = {f"http-{front.place}": front.process.pid for front in self._fronts.values()}
        return {"desk": os.getpid(), "engine": self._client.pid, **dict(sorted(fronts.items()))}

    # ---------------------------------------------------------------- start and end

    async def run(self) -> str | None:
        """Serve until a signal, or until nothing can be served any more. In the second case, returns the reason. Raises
        OctavoError if a setting is invalid, or no front can start."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._signalled)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        watchdog = LoopWatchdog(self._settings.loop_timeout)
        watches: list[asyncio.Task[None]] = []
        try:
            await asyncio.gather(*(self._start(place) for place in range(self._begin.num_fronts)))
            watchdog.start()
            watches = [
                asyncio.create_task(watch)
                for watch in (
                    self._stop_on_failure(),
                    restart_when_stuck(self._client, STUCK * self._settings.liveness_timeout),
                    tell_when_unreachable(self._listener, self._drain),
                )
            ]
            if not self._over.done():
                address = announcement(self._settings, self._listener, self._begin.model_id)
                logger.info("%s, with %d HTTP processes.", address, self._begin.num_fronts)
            failure = await self._over
            await self._stop()
            return failure
        finally:
            for watch in watches:
                watch.cancel()
            for front in self._fronts.values():
                front.process.kill()
            await self._client.close()
            await self._rates.close()
            watchdog.stop()

    def _signalled(self) -> None:
        if self._drain.draining:
            for front in self._fronts.values():
                front.process.kill()
            end_at_second_signal(self._listener)  # do not wait for the engine's step or for a client
        self._drain.begin()
        self._tell_all(Stop())  # a front that is starting must not serve first
        self._end(None)

    def _hang_up(self) -> None:
        if self._settings.api_key_file is None:
            logger.warning(NO_FILE)
        else:
            self._tell_all(ReloadKeys())

    def _end(self, failure: str | None) -> None:
        assert self._over is not None
        if not self._over.done():
            self._over.set_result(failure)

    async def _stop_on_failure(self) -> None:
        self._end(await self._client.wait_failed())

    async def _stop(self) -> None:
        limit = self._settings.shutdown_timeout
        logger.info("Stopping. Running requests get up to %g seconds. A second signal stops immediately.", limit)
        self._drain.begin()
        self._listener.socket.close()  # otherwise connections to a socket without readers would wait
        self._tell_all(Stop())
        late = time.monotonic() + limit + 3 * LAST_WORDS + _GRACE
        while self._fronts and time.monotonic() < late:
            await asyncio.sleep(0.02)

    def _tell_all(self, body: Body) -> None:
        for front in self._fronts.values():
            if front.line is not None:
                front.line.tell(body)

    def _tell_engine(self) -> None:
        self._tell_all(self._engine())

    def _engine(self) -> EngineServes | EngineDied:
        return _state(self._client) if self._client.is_alive else EngineDied(self._client.death or "it is shut down")

    # ---------------------------------------------------------------- fronts come and go

    async def _start(self, place: int) -> None:
        self._num_started += 1
        # Its metrics are in files that other processes can read.
        environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(self._folder)}
        try:
            ours, process = start_child(f"{__package__}.front", environment, pass_fds=(self._begin.listener,))
        except OSError as problem:
            raise OctavoError(f"cannot start an HTTP process ({sys.executable}): {problem}.") from problem
        front = _Front(place, f"front-{self._num_started}".encode(), process, Desk(self._counts))
        self._fronts[place] = front
        line = await Line.over(ours, partial(self._answer, front), partial(self._gone, front))
        line.tell(self._first_words(front))
        if not self._client.is_alive:
            line.tell(self._engine())
        if self._drain.draining:
            line.tell(Stop())
        front.line = line
        await front.ready

    def _first_words(self, front: _Front) -> Begin:
        engine = _state(self._client) if self._client.is_alive else self._begin.engine
        words = {name: getattr(self._begin, name) for name in self._begin.__struct_fields__}
        return Begin(
            **words
            | {"name": front.name, "place": front.place, "engine": engine, "tell_facts": front.name == b"front-1"}
        )

    def _gone(self, front: _Front) -> None:
        """Drop a front's counts and end its requests, because its connection is closed."""
        if self._fronts.get(front.place) is front:
            del self._fronts[front.place]
        Shares(Path(self._begin.shares), front.place).show(0)
        lost = front.desk.close()
        self._client.dismiss(front.name)
        burial = asyncio.ensure_future(self._bury(front, lost))
        self._burials.add(burial)
        burial.add_done_callback(self._burials.discard)

    async def _bury(self, front: _Front, lost: int) -> None:
        status = await asyncio.to_thread(_end, front.process)
        if not front.ready.done() and self._drain.draining:
            front.ready.set_result(None)
        elif not front.ready.done():
            problem = f"a process that answers HTTP ended with status {status} before it served; see its log lines."
            front.ready.set_exception(OctavoError(problem))
        elif not self._drain.draining and front.ready.exception() is None:
            self._replaced.inc()
            self._lost_prompts.inc(lost)
            logger.error(
                "HTTP process %d ended with status %d; %d prompts are lost. A new process "
                "replaces it.",
                front.process.pid, status, lost,
            )  # fmt: skip
            await self._replace(front.place)

    async def _replace(self, place: int) -> None:
        while not self._drain.draining:
            try:
                await self._start(place)
            except OctavoError as problem:
                self._num_failures += 1
                if self._num_failures >= self._settings.max_engine_failures and not self._fronts:
                    self._end(str(problem))
                    return
                delay = min(_FIRST_DELAY * 2 ** (self._num_failures - 1), _MAX_DELAY)
                logger.error("The HTTP process could not be replaced (next attempt in %.1f s): %s", delay, problem)
                await asyncio.sleep(delay)
            else:
                self._num_failures = 0
                logger.info("A new HTTP process has replaced it.")
                return

    # ---------------------------------------------------------------- requests from fronts

    def _answer(self, front: _Front, body: Body) -> Body | Awaitable[Body] | None:
        match body:
            case FrontReady():
                front.ready.set_result(None)
            case FrontFailed(message):
                front.ready.set_exception(ConfigError(message))
            case GiveUp(cause):
                self._client.give_up(cause)
            case Render(accept):
                return self._render(accept)
            case CancelElsewhere(response_id, tenant):
                return self._cancel(front, CancelHere(response_id, tenant))
            case _:
                return front.desk.answer(body)
        return None

    async def _render(self, accept: str | None) -> RenderedMetrics:
        lines = [(front, front.listening()) for front in self._fronts.values()]
        await asyncio.gather(*(self._count(front, line) for front, line in lines if line is not None))
        return RenderedMetrics(*self._exposition.render(accept))

    async def _count(self, front: _Front, line: Line) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):  # it is busy, or has just ended
            async with asyncio.timeout(_PATIENCE):
                counted = await line.ask(Count())
                assert isinstance(counted, Counted)
                front.counted = counted

    async def _cancel(self, asking: _Front, question: CancelHere) -> Cancelled:
        for front in list(self._fronts.values()):
            line = front.listening()
            if front is not asking and line is not None:
                with contextlib.suppress(ConnectionError):
                    found = await line.ask(question)
                    if isinstance(found, Cancelled) and found.answer is not None:
                        return found
        return Cancelled(None)


def _end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
