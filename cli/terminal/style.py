"""Output with colours and tables in a terminal, plain text in a pipe."""

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
    """Whether the stream (default: stdout) takes colours: it is a terminal that can show them, and colours are not
    turned off.

    Pipes and TERM=dumb show no colours; NO_COLOR (no-color.org) and --no-color turn them off.
    """
    stream = sys.stdout if stream is None else stream
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
    return wanted and stream.isatty()


def take_plain_flag(arguments: list[str]) -> list[str]:
    """The arguments without --no-color, if it stands before a lone --; it makes all later output plain."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if PLAIN_FLAG not in arguments[:end]:
        return arguments
    os.environ["NO_COLOR"] = "1"  # child processes see it too
    return [argument for argument in arguments[:end] if argument != PLAIN_FLAG] + arguments[end:]


def console(stream: TextIO | None = None) -> Console:
    """Rich's console for a stream that `is_rich`."""
    from rich.console import Console

    return Console(file=stream, highlight=False, soft_wrap=True)


def styled(text: str, style: str, stream: TextIO | None = None) -> str:
    """The text in a Rich style ("bold", "dim", "red"), or unchanged if the stream takes no colours."""
    if not text or not is_rich(stream):
        return text
    from rich.style import Style

    return Style.parse(style).render(text)


def harmless(text: str, stream: TextIO | None = None) -> str:
    """A model's text without terminal control characters; a pipe gets it unchanged."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return text
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "\N{REPLACEMENT CHARACTER}", text)


def problem_text(who: str, text: str) -> str:
    """An error for stderr: the command's name, in red if colours are shown, and the message."""
    lines = filled(f"{who}: {text}", sys.stderr)
    return styled(who, "bold red", sys.stderr) + lines.removeprefix(who)


def say(who: str, text: str) -> None:
    """Print an error to stderr, so that stdout has only answers."""
    print(problem_text(who, text), file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print a remark to stderr."""
    print(styled(filled(text, sys.stderr), "dim", sys.stderr), file=sys.stderr, flush=True)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> None:
    """Print rows under headings: with rules in a terminal; otherwise in columns, without padding of the last one.
    `numbers`: indices of right-aligned columns."""
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
