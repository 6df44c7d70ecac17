"""The engine's own process: `python -m engine.process.main`, started by `engine.process.launch`, with the lifeline as
its standard input.

It ends when its client does, whatever ended that: then the lifeline closes. Signals meant for the service
(Ctrl-C and a terminal's hangup go to the whole group) are the client's to obey.
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
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import zmq

from engine.errors import OctavoError, RequestFailedError
from engine.host.logs import adopt_libraries, configure
from engine.host.signals import leave_signals_to_parent
from engine.interface.outputs import EngineStats, RequestDelta
from engine.interface.request import SamplingParams
from engine.process.messages import (
    GOODBYE,
    Abort,
    Add,
    Failed,
    Look,
    News,
    Ready,
    Start,
    decode_command,
    encode,
    receive_start,
    send_framed,
)

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.interface.cache_map import CacheMap

logger = logging.getLogger("octavo.process")


def main() -> int:
    """Load the engine and serve its client until that is gone; returns the exit status."""
    leave_signals_to_parent()
    line = _take_lifeline()
    start = receive_start(line)
    if start is None:
        return 0
    threading.Thread(target=_end_with_client, args=(line, start.folder), name="octavo-lifeline", daemon=True).start()
    if start.log_format is not None:
        configure(start.log_level, start.log_format)
    try:
        _run(start, line)
    except OctavoError as error:  # explains itself
        return _report(line, error)
    except BaseException as error:
        logger.exception("the engine's process ends")
        return _report(line, error)
    return 0


def _take_lifeline() -> socket.socket:
    """The lifeline under another number, and nothing on standard input: no child may hold it open."""
    line = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return line


def _end_with_client(line: socket.socket, folder: str) -> None:
    with contextlib.suppress(ConnectionError):
        if line.recv(1) == GOODBYE:
            os._exit(0)  # the folder is the client's, and perhaps a successor's
    # The client is gone without a word, and nothing else would remove it.
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _report(line: socket.socket, error: BaseException) -> int:
    if isinstance(error, OctavoError):
        message = Failed.of(error)
    else:
        message = Failed(type(error).__name__, str(error) or "no further explanation")
    send_framed(line, message)
    return 1


def _run(start: Start, line: socket.socket) -> None:
    from engine.engine import Engine  # heavy: the lifeline is watched already

    if start.log_format is not None:
        adopt_libraries()
    engine = Engine(start.config)
    # What is here now stays: a full collection that looked through it would hold up a step.
    gc.collect()
    gc.freeze()
    context = zmq.Context()
    # DEALER queues, keeps the order, and blocks rather than drops when the client does not read.
    with context.socket(zmq.DEALER) as news:
        news.bind(start.address)
        send_framed(line, Ready(engine.info, engine.stats()))
        Loop(engine, news).run()


class Loop:
    """Commands in, steps, news out.

    Args:
        engine: loaded.
        channel: a bound or connected ZeroMQ socket.
    """

    def __init__(self, engine: Engine, channel: Any):
        self._engine = engine
        self._channel = channel
        self._num_commands = 0
        self._num_steps = 0  # that the client knows of
        self._compiling: dict[str, tuple[Add, Future[Any]]] = {}  # requests whose grammars are, by their ids
        self._woken, self._wake = socket.socketpair()  # readable once one of these is compiled
        self._woken.setblocking(False)

    def run(self) -> None:
        """Serve; ends only with an exception, which is the process's end."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Carry out what has been asked, waiting for it if there is nothing to compute; then one step."""
        self._obey()
        if self._engine.has_unfinished_requests():
            deltas = self._engine.step_deltas()
            stats = self._engine.stats()
            if deltas or stats.num_steps != self._num_steps:
                self._tell(deltas, {}, stats)

    def _obey(self) -> None:
        accepted: list[RequestDelta] = []
        failed: dict[str, Failed] = {}
        before, looked = self._num_commands, False
        for data in self._commands():
            self._num_commands += 1
            command = decode_command(data)
            if isinstance(command, Abort):
                if self._compiling.pop(command.request_id, None) is None:
                    self._engine.abort_request(command.request_id, command.choice)
            elif isinstance(command, Look):
                looked = True
            elif isinstance(command, Add):
                if not self._waits(command):
                    self._answer(command, self._add(command), accepted, failed)
            else:
                failed[command[0]] = Failed.of(command[1])
        if self._compiling:
            self._add_compiled(accepted, failed)
        if self._num_commands != before or accepted or failed:
            # At once: the step may take a while.
            self._tell(accepted, failed, self._engine.stats(), self._look() if looked else None)

    @staticmethod
    def _answer(
        command: Add, error: OctavoError | None, accepted: list[RequestDelta], failed: dict[str, Failed]
    ) -> None:
        if error is None:
            accepted.append(RequestDelta(request_id=command.request_id, choices=()))
        else:
            failed[command.request_id] = Failed.of(error)

    def _waits(self, command: Add) -> bool:
        """Whether a request's grammar is being compiled; steps go on meanwhile."""
        params = command.params
        if not isinstance(params, SamplingParams) or params.structured_outputs is None:
            return False
        compiled = self._engine.prepare(params.structured_outputs)
        if compiled is None:
            return False
        self._compiling[command.request_id] = command, compiled
        compiled.add_done_callback(lambda _: self._wake.send(b"\0"))
        return True

    def _add_compiled(self, accepted: list[RequestDelta], failed: dict[str, Failed]) -> None:
        """Add the requests whose grammars are compiled by now; refuse those whose cannot be."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        for request_id, (command, compiled) in list(self._compiling.items()):
            if compiled.done():
                del self._compiling[request_id]
                self._answer(command, _refusal(compiled) or self._add(command), accepted, failed)

    def _commands(self) -> Iterator[bytes]:
        if not self._engine.has_unfinished_requests():
            if self._compiling:
                self._wait()
            else:
                yield self._channel.recv()
        while True:
            try:
                yield self._channel.recv(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _wait(self) -> None:
        """Wait for a command, or until a grammar is compiled."""
        poller = zmq.Poller()
        poller.register(self._channel, zmq.POLLIN)
        poller.register(self._woken.fileno(), zmq.POLLIN)
        poller.poll()

    def _add(self, command: Add) -> OctavoError | None:
        try:
            self._engine.add_request(
                command.request_id,
                command.input,
                command.params,
                priority=command.priority,
                cache_salt=command.cache_salt,
                deadline=command.deadline,
                tenant=command.tenant,
            )
        except OctavoError as error:
            return error
        except Exception as error:  # a fault of ours; it must not take the other requests along
            logger.exception("request %s could not be added", command.request_id)
            return RequestFailedError(f"{type(error).__name__}: {error}")
        return None

    def _look(self) -> CacheMap | None:
        try:
            return self._engine.cache_map()
        except Exception:  # an observer must not stop the work
            logger.exception("the map of the cache could not be drawn")
            return None

    def _tell(
        self,
        deltas: list[RequestDelta],
        failed: dict[str, Failed],
        stats: EngineStats,
        cache_map: CacheMap | None = None,
    ) -> None:
        self._num_steps = stats.num_steps
        self._channel.send(encode(News(deltas, failed, stats, self._num_commands, cache_map)))


def _refusal(compiled: Future[Any]) -> OctavoError | None:
    """Why a grammar could not be compiled, if so."""
    error = compiled.exception()
    if error is None or isinstance(error, OctavoError):
        return error
    logger.error("a grammar could not be compiled", exc_info=error)
    return RequestFailedError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # Not by an ordinary end: threads of libraries and a half-done step are not waited for.
    status = main()
    sys.stderr.flush()
    os._exit(status)
