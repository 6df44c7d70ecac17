"""Ends the process that started it once no heartbeat has come from there for too long: a process of its own, which
`server.watchdog` starts, with the heartbeats on its standard input.

    python -I -S loop_guard.py SECONDS

A thread of the watched process could not run while another one holds the interpreter's lock, and a timer that needs no
lock (`faulthandler.dump_traceback_later`) ends a process that was stopped for a while (SIGSTOP, a frozen container) as
soon as it goes on. Here silences are counted, not seconds: the time in which this process was stopped as well is at
most one of them, and one in which the other process was stopped is none.

Imports what starts fast and is small, and nothing of this package.
"""

from __future__ import annotations

import os
import select
import signal
import sys

SIGNAL = signal.SIGQUIT
_SILENCES = 10  # in a row, a tenth of the limit each
_GRACE = 5.0  # seconds to end by SIGNAL


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; False if the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def is_silent(seconds: float) -> bool:
    """Whether nothing comes for so long.

    Raises:
        EOFError: the other side has ended.
    """
    if not select.select([0], [], [], seconds)[0]:
        return True
    if not os.read(0, 4096):
        raise EOFError
    return False


def watch(pid: int, timeout: float) -> None:
    """Until that process has ended, or is to be ended."""
    silences = 0
    while silences < _SILENCES:
        silences = silences + 1 if is_silent(timeout / _SILENCES) and not is_stopped(pid) else 0


def end(pid: int, timeout: float) -> None:
    """End that process, after a word about why."""
    print(
        f"octavo: the event loop has stood still for {timeout:g} seconds (loop_timeout), so the process ends with "
        f"status {SIGNAL:d}. What each thread does:",
        file=sys.stderr,
        flush=True,
    )
    os.kill(pid, SIGNAL)
    while not is_silent(_GRACE):  # heartbeats that come now are too late
        pass
    os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Watch the parent."""
    parent = os.getppid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # meant for the service
        signal.signal(signum, signal.SIG_IGN)
    try:
        watch(parent, float(sys.argv[1]))
        if os.getppid() == parent:
            end(parent, float(sys.argv[1]))
    except EOFError:
        return


if __name__ == "__main__":
    main()
