"""Watchdogs that end a stuck process so that it is started again: an engine that has work but makes no progress (such
as one whose driver hangs), and a process whose event loop is blocked, in which nothing could answer any more.

`server.loop_guard`, a separate process, gets heartbeats from the event loop, and sends a signal if they stop. The
handler of that signal needs neither the event loop nor the interpreter's lock: faulthandler writes all threads' stacks
to stderr and passes control to libc's `_exit`. This also works for a container's first process, which a signal without
a handler does not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import subprocess
import sys
from pathlib import Path

from engine.process.client import EngineClient
from server.loop_guard import SIGNAL

logger = logging.getLogger("octavo.server")

STUCK = 3  # times the liveness timeout, so that an external monitor of /health/live acts first
STATUS = int(SIGNAL)  # the process's exit status: `_exit` gets the argument of a signal handler, the signal's number
_GUARD = Path(__file__).with_name("loop_guard.py")
_BEATS = 40  # while the limit passes
# This many checks in a row, a tenth of the limit apart: after the service itself was suspended, the first check comes
# before the engine's updates.
_LOOKS = 3
_NEEDED = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # variables to start Python; it needs no keys or tokens


class LoopWatchdog:
    """A watchdog for the event loop: from `start` to `stop` the loop must respond, or the process ends. `timeout`:
    seconds that it may be blocked; 0 for no limit."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._beat: asyncio.TimerHandle | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._line = -1

    def start(self) -> None:
        """Watch the running event loop. Call it in the main thread, once."""
        if self._timeout:
            _end_by_signal()
            self._start_guard()

    def stop(self) -> None:
        """Stop watching; idempotent."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        if self._guard is not None:
            os.close(self._line)
            self._guard.wait()
            self._guard = None

    def _start_guard(self) -> None:
        command = [sys.executable, "-I", "-S", str(_GUARD), str(self._timeout)]
        environment = {name: os.environ[name] for name in _NEEDED if name in os.environ}
        theirs, self._line = os.pipe()
        os.set_blocking(self._line, False)
        try:
            self._guard = subprocess.Popen(command, stdin=theirs, stdout=2, env=environment)
        except OSError as problem:
            os.close(self._line)
            logger.error(
                "The event loop is not watched (loop_timeout), because %s cannot be started: %s", _GUARD, problem
            )
        else:
            self._tick()
        finally:
            os.close(theirs)

    def _tick(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError):  # it is suspended, and has enough to read
                os.write(self._line, b".")
        except BrokenPipeError:
            self.stop()
            logger.warning("The process that watches the event loop (loop_timeout) ended and is restarted.")
            self._start_guard()
        else:
            self._beat = asyncio.get_running_loop().call_later(self._timeout / _BEATS, self._tick)


def _end_by_signal() -> None:
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    libc.signal(STATUS, ctypes.cast(libc._exit, ctypes.c_void_p))
    faulthandler.register(SIGNAL, all_threads=True, chain=True)


async def restart_when_stuck(client: EngineClient, limit: float) -> None:
    """Watch until cancelled. `limit`: seconds without progress after which the engine is abandoned."""
    looks = 0
    while True:
        await asyncio.sleep(limit / 10)
        progress = client.progress
        looks = looks + 1 if not progress.idle and progress.seconds > limit else 0
        if looks == _LOOKS:
            client.give_up(f"the engine had work and made no progress for {progress.seconds:.0f} seconds")
