"""Signals that end a command, even while it reads from the terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

_GRACE = 5.0  # seconds that a regular exit may take


def end_with(*names: str) -> None:
    """Let these signals end the process with status 128 + number, by a regular exit if possible.

    Python runs a signal handler only between two of its own instructions. If a signal arrives just before a read from
    the terminal, its handler would wait for the next key. So a thread, which the system wakes, then ends the process.
    """
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows lacks some
    for number in numbers:
        signal.signal(number, _end)
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    threading.Thread(target=_insist, args=(told, numbers, terminal_settings()), daemon=True).start()


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def _insist(told: int, numbers: list[int], terminal: Any) -> None:
    while (signum := os.read(told, 1)[0]) not in numbers:
        pass
    time.sleep(_GRACE)
    if terminal is not None:
        with contextlib.suppress(OSError):
            set_terminal(terminal)
    os._exit(128 + signum)


def terminal_settings() -> Any:
    """The settings of stdin's terminal; None without a terminal and on Windows."""
    if not (sys.stdin and sys.stdin.isatty()):
        return None
    try:
        import termios
    except ImportError:  # Windows
        return None
    return termios.tcgetattr(sys.stdin.fileno())


def set_terminal(settings: Any) -> None:
    """Set the settings of stdin's terminal."""
    import termios

    termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, settings)
