"""Ends its parent process if heartbeats stop for too long. This is a separate process that `server.watchdog` starts;
the heartbeats come over standard input.

    python -I -S loop_guard.py SECONDS

A thread of the watched process could not run while another thread holds the interpreter's lock. A timer that needs no
lock (`faulthandler.dump_traceback_later`) would end a process that was only suspended (SIGSTOP, a frozen container) as
soon as it resumes. So this process counts silent intervals, not seconds. The time in which it was itself suspended
counts as at most one interval, and an interval in which the other process was suspended does not count.

It imports only small modules that load fast, and nothing from this package.
"""

from __future__ import annotations

import os
import select
import signal
import sys

SIGNAL = signal.SIGQUIT
_SILENCES = 10  # silent intervals in a row, each a tenth of the limit
_GRACE = 5.0  # seconds that the process has to end after SIGNAL


def is_stopped(pid: int) -> bool:
    """Whether a process is suspended by a signal or a debugger; False if the system does not report it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def is_silent(seconds: float) -> bool:
    """Whether nothing arrives for this long. Raises EOFError if the other process has ended."""
    if not select.select([0], [], [], seconds)[0]:
        return True
    if not os.read(0, 4096):
        raise EOFError
    return False


def watch(pid: int, timeout: float) -> None:
    """Watch until that process ends or must be ended."""
    silences = 0
    while silences < _SILENCES:
        silences = silences + 1 if is_silent(timeout / _SILENCES) and not is_stopped(pid) else 0


def end(pid: int, timeout: float) -> None:
    """End that process, after a message with the reason."""
    print(
        f"octavo: the event loop has been blocked for {timeout:g} seconds (loop_timeout), so the process ends with "
        f"status {SIGNAL:d}. What each thread is doing:",
        file=sys.stderr,
        flush=True,
    )
    os.kill(pid, SIGNAL)
    while not is_silent(_GRACE):  # heartbeats that arrive now are too late
        pass
    os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Watch the parent process."""
    parent = os.getppid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # signals meant for the service
        signal.signal(signum, signal.SIG_IGN)
    try:
        watch(parent, float(sys.argv[1]))
        if os.getppid() == parent:
            end(parent, float(sys.argv[1]))
    except EOFError:
        return


if __name__ == "__main__":
    main()
