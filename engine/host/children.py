"""A service's processes: signals are for the one that a user started, which ends the others, and each of these has a
line to it as its standard input."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

_PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a terminal sends some of them to all its processes


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Their handlers are called at the end. A child that is started meanwhile inherits that they are blocked, so that
    none of them ends it before it calls `leave_signals_to_parent`."""
    came: list[tuple[int, FrameType | None]] = []

    def keep(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    handlers = {signum: signal.getsignal(signum) for signum in _PARENTS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS)
    # The mask is this thread's. Another one may take the signal, and Python calls its handler in the main one.
    in_main = threading.current_thread() is threading.main_thread()
    held = [signum for signum, handler in handlers.items() if in_main and callable(handler)]
    for signum in held:
        signal.signal(signum, keep)
    try:
        yield
    finally:
        # First, since `keep` raises nothing: a signal that another thread took late may come at any moment, and what a
        # handler raises then must not leave signals blocked, or handlers that are not a caller's.
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
    """Give signals their handlers again. Returns the exception that one of them raised meanwhile, if any.

    Args:
        instead: what stands in their places.
    """
    raised: BaseException | None = None
    while left := [signum for signum in handlers if signal.getsignal(signum) is instead]:
        try:
            for signum in left:
                signal.signal(signum, handlers[signum])
        except BaseException as error:
            raised = error
    return raised


def leave_signals_to_parent() -> None:
    """Ignore them from now on."""
    for signum in _PARENTS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS)


def take_standard_input() -> socket.socket:
    """The socket that a process was started with as its standard input, under another number, and nothing in its
    place: no child may hold it open."""
    line = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return line
