"""The engine's process: `python -m engine.process.main`, started by `engine.process.launch`, with the lifeline as its
standard input.

It has one or more clients. It ends when the client that started it ends, for whatever reason, because the lifeline then
closes. Signals for the whole group (Ctrl-C, or a terminal's hangup) are left to that client.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from engine.configs.alone import take_configs_alone
from engine.errors import OctavoError, RequestFailedError
from engine.host.children import leave_signals_to_parent, take_standard_input
from engine.host.loading import LOADING
from engine.host.logs import adopt_libraries, configure
from engine.host.resident import give_back, give_back_code
from engine.interface.outputs import EngineStats, RequestDelta
from engine.interface.request import SamplingParams
from engine.process.messages import (
    GOODBYE,
    Abort,
    AddRequest,
    Dismiss,
    Failed,
    JoinEngine,
    Known,
    LoadAdapter,
    Loading,
    Look,
    News,
    Ready,
    Start,
    UnloadAdapter,
    Warm,
    decode_command,
    encode,
    receive_known,
    receive_start,
    send_framed,
)

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.execution.executor import Reading
    from engine.interface.cache_map import CacheMap

logger = logging.getLogger("octavo.process")

MOST_COMMANDS = 512  # taken between two steps; one request for embeddings can bring 2,048
READING_PAUSE = 20  # milliseconds between two looks at an adapter that is being read
WARM_AFTER = 1.0  # seconds after the start, so that the first requests go first


def main() -> int:
    """Load the engine and serve its client until the client is gone; returns the exit status."""
    leave_signals_to_parent()
    line = take_standard_input()
    start = receive_start(line)
    if start is None:
        return 0
    known: Future[Known] = Future()
    leave: list[Callable[[], None]] = []
    arguments = (line, start.folder, known, leave)
    threading.Thread(target=_end_with_client, args=arguments, name="octavo-lifeline", daemon=True).start()
    if start.log_format is not None:
        configure(start.log_level, start.log_format)
    try:
        _run(start, known, line, leave)
    except OctavoError as error:  # explains itself
        return _report(line, error)
    except BaseException as error:
        logger.exception("the engine's process ends")
        return _report(line, error)
    return 0


def _end_with_client(
    line: socket.socket, folder: str, known: Future[Known], leave: Sequence[Callable[[], None]]
) -> None:
    """End the process when the client is gone. `leave`: called before, if there is time."""
    if (told := receive_known(line)) is not None:
        known.set_result(told)
    with contextlib.suppress(ConnectionError):
        if line.recv(1) == GOODBYE:
            _leave(leave)
            os._exit(0)  # the folder belongs to the client, and perhaps to a successor of this process
    # The client has vanished, and nothing else would remove the folder.
    shutil.rmtree(folder, ignore_errors=True)
    _leave(leave)
    os._exit(0)


def _leave(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        try:
            task()
        except Exception:  # the process ends anyway
            logger.exception("the engine's process ends with work left undone")


def _report(line: socket.socket, error: BaseException) -> int:
    if isinstance(error, OctavoError):
        message = Failed.of(error)
    else:
        message = Failed(type(error).__name__, str(error) or "no further explanation")
    send_framed(line, message)
    return 1


def _run(start: Start, known: Future[Known], line: socket.socket, leave: list[Callable[[], None]]) -> None:
    from engine.engine import Engine  # slow import; the lifeline is already watched
    from engine.model.checkpoint import read_config

    def read(path: Path) -> Any:
        told = known.result()
        if told.config is not None and Path(told.folder) == path:
            return read_config(path, told.config)
        take_configs_alone()
        return read_config(path)

    if start.log_format is not None:
        adopt_libraries()
    give_back_code()  # code that imports read, before weights are read
    LOADING.listener = lambda percent: send_framed(line, Loading(percent))
    engine = Engine(start.config, read)
    LOADING.listener = None
    leave.append(engine.keep_pages)
    for name, path in start.adapters.items():
        try:
            engine.load_adapter(name, path)
        except OctavoError as error:
            logger.error("After the restart, the adapter %s is no longer served: %s", name, error)
    engine.info = replace(engine.info, adapters=tuple(engine.adapters.values()))
    # Objects that exist now stay: a full collection that scanned them would delay a step.
    gc.collect()
    gc.freeze()
    context = zmq.Context()
    # ROUTER distinguishes its clients. No limit: news that one client does not read delays no other client, and is
    # dropped with its requests.
    with context.socket(zmq.ROUTER) as channel:
        channel.set(zmq.SNDHWM, 0)
        channel.bind(start.address)
        send_framed(line, Ready(engine.info, engine.stats()))
        give_back()
        give_back_code()
        if engine.warms_grammars:
            warming = threading.Timer(WARM_AFTER, engine.warm_grammars)
            warming.daemon = True
            warming.start()
        Loop(engine, channel).run()


@dataclass(slots=True)
class _Client:
    """A client, and the news that it has not received yet."""

    name: bytes
    num_commands: int = 0
    deltas: list[RequestDelta] = field(default_factory=list)
    failed: dict[str, Failed] = field(default_factory=dict)
    looked: bool = False
    knows_adapters: bool = False


class Loop:
    """The engine's loop: it takes commands, runs steps, and sends news.

    Every client is told of every step, but only about its own requests. `channel`: a bound ZeroMQ socket of type
    ROUTER.
    """

    def __init__(self, engine: Engine, channel: Any):
        self._engine = engine
        self._channel = channel
        self._clients: dict[bytes, _Client] = {}
        self._dismissed: set[bytes] = set()
        self._owners: dict[str, _Client] = {}  # the engine's requests by id
        self._num_steps = 0  # steps that the clients know of
        self._busy = False  # as last told to the clients
        # Requests whose grammars are being compiled, by client and id.
        self._compiling: dict[tuple[bytes, str], tuple[AddRequest, Future[Any]]] = {}
        self._reading: list[tuple[_Client, LoadAdapter, Reading]] = []  # adapters that are being read
        self._woken, self._wake = socket.socketpair()  # readable once one of these grammars is compiled
        self._woken.setblocking(False)

    def run(self) -> None:
        """Serve; ends only with an exception, which ends the process."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Carry out the commands, waiting for one if there is nothing to compute. Then run one step."""
        self._obey()
        if self._engine.has_unfinished_requests():
            deltas = self._engine.step_deltas()
            stats, busy = self._engine.stats(), self._engine.has_unfinished_requests()
            if deltas or stats.num_steps != self._num_steps or busy != self._busy:
                self._num_steps, self._busy = stats.num_steps, busy
                for delta in deltas:
                    self._hand_over(delta)
                self._tell(self._clients.values(), stats)

    def _obey(self) -> None:
        concerned: dict[bytes, _Client] = {}
        for name, data in self._commands():
            if name not in self._dismissed:
                client = concerned[name] = self._clients.setdefault(name, _Client(name))
                self._carry_out(client, data)
        if self._compiling:
            concerned |= {client.name: client for client in self._add_compiled()}
        if self._reading:
            concerned |= {client.name: client for client in self._load_read()}
        busy = self._engine.has_unfinished_requests()
        if concerned:
            # Send this at once: the step may take a while. All clients are told when work begins and ends.
            told = [client for client in concerned.values() if client.name in self._clients]
            known = all(client.knows_adapters for client in self._clients.values())
            self._tell(told if busy == self._busy and known else self._clients.values(), self._engine.stats())
        self._busy = busy

    def _carry_out(self, client: _Client, data: bytes) -> None:
        command = decode_command(data)
        if isinstance(command, JoinEngine):
            return
        client.num_commands += 1
        if isinstance(command, Abort):
            self._abort(client, command)
        elif isinstance(command, Look):
            client.looked = True
        elif isinstance(command, AddRequest):
            if not self._waits(client, command):
                self._answer(client, command, self._add(client, command))
        elif isinstance(command, Warm):
            self._engine.warm_grammars()
        elif isinstance(command, Dismiss):
            self._dismiss(command.client)
        elif isinstance(command, LoadAdapter | UnloadAdapter):
            self._change_adapters(client, command)
        else:
            client.failed[command[0]] = Failed.of(command[1])

    def _change_adapters(self, client: _Client, command: LoadAdapter | UnloadAdapter) -> None:
        with self._answering(client, command):
            if isinstance(command, LoadAdapter):
                reading = self._engine.read_adapter(command.name, command.path)
                self._reading.append((client, command, reading))
                return
            self._engine.unload_adapter(command.name)
            self._adapters_changed(client, command)

    def _load_read(self) -> list[_Client]:
        """Load the adapters that have been read. Their clients."""
        ready = [entry for entry in self._reading if entry[2].ready]
        for client, command, reading in ready:
            self._reading.remove((client, command, reading))
            with self._answering(client, command):
                self._engine.finish_adapter(command.name, reading)
                self._adapters_changed(client, command)
        return [client for client, _, _ in ready]

    def _adapters_changed(self, client: _Client, command: LoadAdapter | UnloadAdapter) -> None:
        client.deltas.append(RequestDelta(request_id=command.call, choices=(), finished=True))
        for each in self._clients.values():
            each.knows_adapters = False

    @contextlib.contextmanager
    def _answering(self, client: _Client, command: LoadAdapter | UnloadAdapter) -> Iterator[None]:
        """Answer a command with the error that carrying it out raises."""
        try:
            yield
        except OctavoError as error:
            client.failed[command.call] = Failed.of(error)
        except Exception as error:  # a bug of ours, which must not end the requests
            logger.exception("the adapter %s could not be loaded or unloaded", command.name)
            client.failed[command.call] = Failed.of(RequestFailedError(f"{type(error).__name__}: {error}"))

    def _abort(self, client: _Client, command: Abort) -> None:
        if self._compiling.pop((client.name, command.request_id), None) is not None:
            return
        if self._owners.get(command.request_id) is client:
            self._engine.abort_request(command.request_id, command.choice)
            if command.choice is None:
                del self._owners[command.request_id]

    def _dismiss(self, name: bytes) -> None:
        """End all requests of a client that has gone. Its last commands may arrive later than this."""
        self._dismissed.add(name)
        client = self._clients.pop(name, None)
        for key in [key for key in self._compiling if key[0] == name]:
            del self._compiling[key]
        for request_id in [request_id for request_id, owner in self._owners.items() if owner is client]:
            self._engine.abort_request(request_id, None)
            del self._owners[request_id]

    def _answer(self, client: _Client, command: AddRequest, error: OctavoError | None) -> None:
        if error is None:
            client.deltas.append(RequestDelta(request_id=command.request_id, choices=()))
        else:
            client.failed[command.request_id] = Failed.of(error)

    def _hand_over(self, delta: RequestDelta) -> None:
        owner = self._owners.get(delta.request_id)
        if owner is not None:
            owner.deltas.append(delta)
            if delta.finished:
                del self._owners[delta.request_id]

    def _waits(self, client: _Client, command: AddRequest) -> bool:
        """Whether a request has to wait until its grammar is compiled or its breakers are found; steps continue
        meanwhile."""
        params = command.params
        if not isinstance(params, SamplingParams) or not (params.structured_outputs or params.uses_dry):
            return False
        compiled = self._engine.prepare(params)
        if compiled is None:
            return False
        self._compiling[client.name, command.request_id] = command, compiled
        compiled.add_done_callback(lambda _: self._wake.send(b"\0"))
        return True

    def _add_compiled(self) -> list[_Client]:
        """Add the requests whose grammars have been compiled, and refuse those whose grammars cannot be compiled.
        Returns their clients."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        concerned = []
        for key, (command, compiled) in list(self._compiling.items()):
            if compiled.done():
                del self._compiling[key]
                client, refusal = self._clients[key[0]], _refusal(compiled)
                if refusal is None and self._waits(client, command):
                    continue  # for the other one
                self._answer(client, command, refusal or self._add(client, command))
                concerned.append(client)
        return concerned

    def _commands(self) -> Iterator[tuple[bytes, bytes]]:
        """The commands that wait, each with its client's name.

        While requests run, at most MOST_COMMANDS are taken between two steps, so that a burst of texts delays no
        stream for long.
        """
        busy = self._engine.has_unfinished_requests()
        if not busy:
            if self._compiling or self._reading or self._engine.executor.watched:
                self._wait()
            else:
                yield self._channel.recv_multipart()
        for _ in range(MOST_COMMANDS) if busy else count():
            try:
                yield self._channel.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _wait(self) -> None:
        """Wait for a command, until a grammar is compiled, or a moment while an adapter is being read. Raises
        EngineDeadError if another process that computes ends."""
        executor, poller = self._engine.executor, zmq.Poller()
        for watched in (self._channel, self._woken.fileno(), *executor.watched):
            poller.register(watched, zmq.POLLIN)
        ready = {found for found, _ in poller.poll(READING_PAUSE if self._reading else None)}
        if not ready.isdisjoint(executor.watched):
            executor.check()

    def _add(self, client: _Client, command: AddRequest) -> OctavoError | None:
        try:
            self._engine.add_request(
                command.request_id,
                command.input,
                command.params,
                priority=command.priority,
                cache_salt=command.cache_salt,
                deadline=command.deadline,
                tenant=command.tenant,
                adapter=command.adapter,
            )
        except OctavoError as error:
            return error
        except Exception as error:  # a bug of ours, which must not end the other requests
            logger.exception("request %s could not be added", command.request_id)
            return RequestFailedError(f"{type(error).__name__}: {error}")
        self._owners[command.request_id] = client
        return None

    def _look(self) -> CacheMap | None:
        try:
            return self._engine.cache_map()
        except Exception:  # an observer must not stop the engine
            logger.exception("the map of the cache could not be made")
            return None

    def _tell(self, clients: Iterable[_Client], stats: EngineStats) -> None:
        for client in clients:
            cache_map = self._look() if client.looked else None
            adapters = None if client.knows_adapters else list(self._engine.adapters.values())
            news = News(client.deltas, client.failed, stats, client.num_commands, cache_map, adapters)
            self._channel.send_multipart([client.name, encode(news)])
            client.deltas, client.failed, client.looked, client.knows_adapters = [], {}, False, True


def _refusal(compiled: Future[Any]) -> OctavoError | None:
    error = compiled.exception()
    if error is None or isinstance(error, OctavoError):
        return error
    logger.error("a grammar could not be compiled", exc_info=error)
    return RequestFailedError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # End without the usual cleanup: do not wait for libraries' threads or an unfinished step.
    status = main()
    sys.stderr.flush()
    os._exit(status)
