"""The terminal while a model loads."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from cli.terminal.style import console, is_rich


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show in a terminal that a model is loading; the yielded function takes the progress, such as "40%". The progress
    stands before the model's name, because the name may be long."""
    text = f"Loading {what} ..."
    if is_rich(sys.stderr):
        from rich.text import Text

        with console(sys.stderr).status(Text(text)) as status:
            yield lambda progress: status.update(Text(f"Loading {progress} of {what}"))
    elif sys.stderr.isatty():
        print(text, end="", file=sys.stderr, flush=True)
        try:
            yield lambda progress: print(f"\rLoading {progress} of {what}  ", end="", file=sys.stderr, flush=True)
        finally:
            print(file=sys.stderr)
    else:
        yield lambda progress: None
