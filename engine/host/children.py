"""A service's processes: signals go to the process that a user started, which ends the others; each of these has a
connection to it as its standard input."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

_PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a terminal sends some of them to all its processes


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold these signals within the block; their handlers are called at its end. A child that is started meanwhile
    inherits the blocked signals, so none of them ends it before it calls `leave_signals_to_parent`."""
    came: list[tuple[int, FrameType | None]] = []

    def keep(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    handlers = {signum: signal.getsignal(signum) for signum in _PARENTS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS)
    # The mask is this thread's. Another thread may take the signal, and Python calls its handler in the main thread.
    in_main = threading.current_thread() is threading.main_thread()
    held = [signum for signum, handler in handlers.items() if in_main and callable(handler)]
    for signum in held:
        signal.signal(signum, keep)
    try:
        yield
    finally:
        # First, since `keep` raises nothing: a signal that another thread took late may come at any moment, and an
        # exception from a handler must not leave signals blocked, or handlers in place that are not the caller's.
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raised = _put_back({signum: handlers[signum] for signum in held}, keep)
        if raised is not None:
            raise raised
        for number, frame in came:
            handler = handlers[signal.Signals(number)]
            assert callable(handler)
            handler(number, frame)


_Handler = Callable[[int, FrameType | None], Any] | int | None


def _put_back(handlers: Mapping[signal.Signals, _Handler], instead: _Handler) -> BaseException | None:
    """Restore the signals' handlers. Returns the exception that a handler raised meanwhile, if any. `instead`: the
    handlers in place until then."""
    raised: BaseException | None = None
    while left := [signum for signum in handlers if signal.getsignal(signum) is instead]:
        try:
            for signum in left:
                signal.signal(signum, handlers[signum])
        except BaseException as error:
            raised = error
    return raised


def own_modules() -> dict[str, str]:
    """The environment variable that gives a child this process's module path. It has the working directory only if the
    path here has it."""
    return {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}


def start_child(
    module: str, environment: Mapping[str, str], *, first: bytes = b"", **options: Any
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a module in a new process with this process's module path. Returns a socket whose other end is the child's
    standard input. Raises OSError if the process cannot be started.

    Args:
        environment: the child's environment variables, besides the module path.
        first: bytes that the child reads first; they are sent before it starts.
        options: of `subprocess.Popen`.
    """
    ours, theirs = socket.socketpair()
    command, variables = [sys.executable, "-P", "-m", module], {**environment, **own_modules()}
    process: subprocess.Popen[bytes] | None = None
    try:
        ours.sendall(first)
        with theirs, signals_held():
            process = subprocess.Popen(command, stdin=theirs.fileno(), env=variables, **options)
        return ours, process
    except BaseException:  # a signal's handler may raise anything
        ours.close()
        theirs.close()
        if process is not None:
            process.kill()
            process.wait()
        raise


def leave_signals_to_parent() -> None:
    """Ignore them from now on."""
    for signum in _PARENTS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS)


def end_with_parent(line: socket.socket) -> None:
    """From now on, the kernel ends this process (SIGIO) when the other side of the line closes, whatever it computes
    or imports then. Nothing more may be sent to it."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        if not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):  # it has closed already
            os._exit(0)


def be_killed_with_parent(line: socket.socket) -> None:
    """From now on, the kernel kills this process when the other side of the line closes, even if it is stopped
    (SIGSTOP) then and so cannot notice anything. Nothing may be sent to the line. Only on Linux."""
    if not hasattr(fcntl, "F_SETSIG"):
        return
    fcntl.fcntl(line, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(line, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(line, fcntl.F_SETFL, fcntl.fcntl(line, fcntl.F_GETFL) | os.O_ASYNC)


def take_standard_input() -> socket.socket:
    """Move the socket that the process got as standard input to another descriptor, and put nothing in its
    place, because no child may keep it open."""
    line = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return line
