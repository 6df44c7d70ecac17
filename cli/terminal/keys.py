"""Keys that are typed while a command is busy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from cli.terminal.ending import set_terminal, terminal_settings


@contextlib.contextmanager
def keys_kept() -> Iterator[None]:
    """Turn the echo of keys off within the block; the next reader of the terminal gets the keys. Ctrl-C works and
    discards them."""
    settings = terminal_settings()
    if settings is None:
        yield
        return
    import termios

    quiet = list(settings)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    set_terminal(quiet)
    try:
        yield
    finally:
        set_terminal(settings)
