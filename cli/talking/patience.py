"""Waiting for a server that is still loading its model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from cli.errors import DroppedError, LoadingError, NoServerError, TalkError
from cli.terminal.keys import keys_kept
from cli.terminal.style import note
from cli.terminal.waiting import waiting

T = TypeVar("T")

_BETWEEN = 0.5  # seconds between two requests


def once_loaded(ask: Callable[[], T], url: str, timeout: float) -> T:
    """The result of `ask`, which is repeated while the server loads its model; shows the progress. Raises TalkError if
    the server stopped, refused, or made no progress.

    Args:
        url: the server's address for messages.
        timeout: seconds without progress before giving up.
    """
    try:
        return ask()
    except LoadingError as problem:
        progress = problem.percent
    if not sys.stderr.isatty():
        note(f"The server at {url} is still loading its model; waiting for it.")
    with keys_kept(), waiting(f"the model at {url}") as show:
        since = time.monotonic()
        while True:
            if progress is not None:
                show(f"{progress}%")
            time.sleep(_BETWEEN)
            try:
                return ask()
            except LoadingError as problem:
                if problem.percent != progress:
                    progress, since = problem.percent, time.monotonic()
            except DroppedError:
                pass  # the error may come from the moment when the loaded server took over; the next request will tell
            except NoServerError:
                raise TalkError(f"The server at {url} stopped while it was loading its model.") from None
            if time.monotonic() - since >= timeout:
                raise TalkError(
                    f"The server at {url} is still loading its model, without progress for {timeout:g} s (--timeout)."
                )
