"""Text wrapped to the terminal's width between words; a line of two columns keeps its second column aligned."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import TextIO

_GAP = re.compile(r"\S( {2,})\S")
_NARROWEST = 24  # minimum characters of a second column; if it is narrower, its text goes below the first


def filled(text: str, stream: TextIO) -> str:
    """The text wrapped for a terminal; in a file or a pipe, lines stay whole, so that they can be searched."""
    return fill(text, shutil.get_terminal_size().columns) if stream.isatty() else text


def fill(text: str, width: int) -> str:
    """Each line of the text, wrapped to the width. Words longer than a line stay whole."""
    return "\n".join(_fill_line(line, width) for line in text.split("\n"))


def _fill_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = len(line) - len(line.lstrip())
    gap = _GAP.search(line)
    if gap is None:
        return _wrapped(line[indent:], " " * indent, " " * indent, width)
    column = gap.end() - 1
    if width - column < _NARROWEST:
        below = " " * (indent + 4)
        return f"{line[: gap.start() + 1]}\n{_wrapped(line[column:], below, below, width)}"
    return _wrapped(line[column:], line[:column], " " * column, width)


def _wrapped(text: str, first: str, others: str, width: int) -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )
