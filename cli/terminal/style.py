"""Output: colours and tables at a terminal, plain text in a pipe."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TextIO

from cli.terminal.paragraphs import filled

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_FLAG = "--no-color"


def is_rich(stream: TextIO | None = None) -> bool:
    """Whether the stream (stdout) takes colours: a terminal that can show them, where they are wanted.

    A pipe is none, nor is TERM=dumb; NO_COLOR (no-color.org) and --no-color say that they are not wanted.
    """
    stream = sys.stdout if stream is None else stream
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
    return wanted and stream.isatty()


def take_plain_flag(arguments: list[str]) -> list[str]:
    """The arguments without --no-color, wherever it stands before a lone --; from then on all output is plain."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if PLAIN_FLAG not in arguments[:end]:
        return arguments
    os.environ["NO_COLOR"] = "1"  # what is started from here sees it, too
    return [argument for argument in arguments[:end] if argument != PLAIN_FLAG] + arguments[end:]


def console(stream: TextIO | None = None) -> Console:
    """Rich's console, for a stream that `is_rich`."""
    from rich.console import Console

    return Console(file=stream, highlight=False, soft_wrap=True)


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """The text in a style of Rich's ("bold", "dim", "red"), or as it is where the stream takes none."""
    if not text or not is_rich(stream):
        return text
    from rich.style import Style

    return Style.parse(style).render(text)


def harmless(text: str, stream: TextIO | None = None) -> str:
    """A model's text without characters that command a terminal; a pipe gets it unchanged."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return text
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "\N{REPLACEMENT CHARACTER}", text)


def problem_text(who: str, text: str) -> str:
    """An error for stderr: the command's name, in red where colours are shown, and the message."""
    lines = filled(f"{who}: {text}", sys.stderr)
    return styled(who, "bold red", sys.stderr) + lines.removeprefix(who)


def say(who: str, text: str) -> None:
    """Print an error on stderr, which leaves stdout to the answers."""
    print(problem_text(who, text), file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print a remark on stderr, beside the answers."""
    print(styled(filled(text, sys.stderr), "dim", sys.stderr), file=sys.stderr, flush=True)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> None:
    """Rows under their heads: ruled in a terminal; else in columns, whose last one is as long as it is.

    Args:
        numbers: columns are flush right.
    """
    if is_rich():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for number, name in enumerate(head):
            justify: Literal["right", "left"] = "right" if numbers else "left"
            table.add_column(name, style="cyan" if not number else None, overflow="fold", justify=justify)
        for row in rows:
            table.add_row(*map(Text, row))
        Console(highlight=False).print(table)
        return
    lines = [tuple(head), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [f"{cell:{'>' if numbers else '<'}{width}}" for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())
