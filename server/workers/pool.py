"""Workers for use in the event loop: jobs with limits of time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from engine.host.children import start_child
from engine.host.frames import framed, receive_later
from server.errors import ApiError
from server.workers.frames import MEMORY, Job, JobOutcome

logger = logging.getLogger("octavo.server")

_PATIENCE = 30.0  # seconds in addition to a job's own, for the start of a process and for a busy machine
# Environment variables that a worker's process needs; the service's keys and tokens are not included.
_KEPT = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "HF_HOME")

T = TypeVar("T")


class RefusedError(Exception):
    """The job refused its argument."""


class WorkerLostError(Exception):
    """The job needed more memory than a worker may have, or its process was killed."""


class WorkerStuckError(ApiError):
    """A worker's process neither answered nor ended within its time limit: it is suspended (SIGSTOP, a debugger), or
    the machine is stuck. The client is not at fault."""

    def __init__(self) -> None:
        message = "A worker process of the server did not answer, and was replaced. Try again."
        super().__init__(503, message, code="worker_stuck", headers={"Retry-After": "1"})


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(") ")[2][:1] in "Tt"
    except OSError:
        return False


class _Worker:
    def __init__(self, line: socket.socket):
        self._line = line
        self._pid = 0
        line.setblocking(False)

    async def ready(self) -> bool:
        """Wait until it can work; returns whether it can."""
        number = await receive_later(self._line)
        self._pid = 0 if number is None else int(number)
        return number is not None

    async def exchange(self, job: bytes) -> JobOutcome | None:
        """A job's outcome, or None if the process has ended."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._line, job)
            content = await receive_later(self._line)
        except ConnectionError:
            return None
        return None if content is None else msgspec.msgpack.decode(content, type=JobOutcome)

    @property
    def is_stopped(self) -> bool:
        """Whether it is suspended and would not begin a job now."""
        return _is_stopped(self._pid)

    def close(self) -> None:
        """Close the connection. The worker ends after its current job."""
        self._line.close()

    def kill(self) -> None:
        """Kill it in the middle of a job."""
        with contextlib.suppress(OSError):
            try:
                gone = not self._line.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                gone = False
            if not gone and self._pid:  # so the number is still its own
                os.kill(self._pid, signal.SIGKILL)
        self.close()


class WorkerPool:
    """Workers that are forked when jobs need them, and kept. It does not limit their number; callers do.

    It may be used from one event loop after another, not from several at once.
    """

    def __init__(self) -> None:
        self._forker: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: list[_Worker] = []

    def start(self) -> None:
        """Start the process that forks workers, unless it runs. This takes a second, for which nothing waits."""
        if self._forker is not None and self._forker.poll() is None:
            if not _is_stopped(self._forker.pid):
                return
            logger.error("The process that forks workers is stopped. It is replaced.")
            self._forker.kill()
        self.close()
        environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self._control, self._forker = start_child(
            f"{__package__}.child", environment, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def close(self) -> None:
        """End all workers; a job that still runs ends with its time limit."""
        for worker in self._idle:
            worker.close()
        self._idle.clear()
        if self._control is not None:
            self._control.close()  # this ends the forking process
        if self._forker is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._forker.wait(1.0)
            if self._forker.poll() is None:
                self._forker.kill()
                self._forker.wait()
        self._forker = self._control = None

    async def run(self, name: str, payload: Any, kind: type[T], seconds: float, memory: int = MEMORY) -> T:
        """The result of a job.

        Args:
            name: a job of `server.workers.child`.
            seconds: the time limit.
            memory: maximum bytes.

        Raises:
            RefusedError: the job refused its argument. The error has the job's message.
            TimeoutError: it took too long.
            WorkerLostError: it took too much memory.
            WorkerStuckError: its process is suspended.
        """
        wanted = Job(name, seconds, msgspec.Raw(msgspec.msgpack.encode(payload)), memory)
        job = framed(msgspec.msgpack.encode(wanted))
        while self._idle:
            worker = self._idle.pop()
            if worker.is_stopped:
                worker.kill()
                continue
            outcome = await self._outcome(worker, job, seconds)
            if outcome is not None:
                return _result(outcome, kind)
            # It may have been killed while it was idle. A new worker will show.
        outcome = await self._outcome(await self._fork(), job, seconds)
        if outcome is None:
            raise WorkerLostError
        return _result(outcome, kind)

    async def _fork(self) -> _Worker:
        self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        worker = _Worker(ours)
        try:
            with theirs:
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
            async with asyncio.timeout(_PATIENCE):
                if not await worker.ready():
                    raise RuntimeError("the process that forks workers has ended; what it wrote to stderr says why")
        except TimeoutError:
            worker.kill()
            raise WorkerStuckError from None
        except BaseException:
            worker.kill()
            raise
        return worker

    async def _outcome(self, worker: _Worker, job: bytes, seconds: float) -> JobOutcome | None:
        """A job's outcome; None if the worker ended before its time limit. The worker is kept if possible."""
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(seconds + _PATIENCE):
                outcome = await worker.exchange(job)
        except TimeoutError:  # the kernel would have ended a job that is only late
            logger.error("A worker did not answer for %g seconds. It is replaced.", seconds + _PATIENCE)
            worker.kill()
            raise WorkerStuckError from None
        except BaseException:
            worker.kill()
            raise
        if outcome is None and asyncio.get_running_loop().time() - began >= seconds:
            worker.close()
            raise TimeoutError
        if outcome is None or outcome.is_last:
            worker.close()
        else:
            self._idle.append(worker)
        return outcome


def _result(outcome: JobOutcome, kind: type[T]) -> T:
    if outcome.refused is not None:
        raise RefusedError(outcome.refused)
    if outcome.out_of_memory:
        raise WorkerLostError
    return msgspec.msgpack.decode(outcome.result, type=kind)


@functools.cache
def shared_workers() -> WorkerPool:
    """The process's shared pool, like the event loop's thread pool."""
    return WorkerPool()
