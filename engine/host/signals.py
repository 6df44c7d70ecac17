"""Signals of a service's processes: they are for the one that a user started, which ends the others."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a terminal sends some of them to all its processes


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """They come at the end. A child that is started meanwhile inherits that, so that none of them ends it before it
    calls `leave_signals_to_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Ignore them from now on."""
    for signum in _PARENTS:
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS)
