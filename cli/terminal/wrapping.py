"""Text that streams into a terminal, with line breaks between words."""

from __future__ import annotations

import re
import shutil
import sys

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")
_FENCE = "```"
_LONGEST = 256  # maximum characters of a word that are held back


class Wrapping:
    """Breaks lines at the terminal's width.

    A word is held back until the next one begins, because it may still grow. Fenced code stays unchanged, and so does
    everything if stdout is not a terminal.
    """

    def __init__(self) -> None:
        self._wraps = sys.stdout.isatty()
        self._held = ""  # spaces and the beginning of a word
        self._line = ""  # the content of the line so far
        self._code = False

    def feed(self, piece: str) -> str:
        """The text to print after this piece."""
        if not self._wraps:
            return piece
        text = self._held + piece
        last = re.search(r"\s*\S*\Z", text.rpartition("\n")[2])
        self._held = last[0] if last else ""
        if _is_wide(self._held[-1:]) or len(self._held) > _LONGEST:  # scripts without spaces may break anywhere
            self._held = ""
        return self._place(text.removesuffix(self._held) if self._held else text)

    def end(self) -> str:
        """The text that is still held back."""
        held, self._held = self._held, ""
        return self._place(held)

    def _place(self, text: str) -> str:
        width = shutil.get_terminal_size().columns
        out, space = "", ""
        for part in _PARTS.findall(text):
            if part == "\n":
                self._code ^= self._line.lstrip().startswith(_FENCE)
                out, self._line, space = f"{out}{space}\n", "", ""
            elif part.isspace():
                space = part
            else:
                for word in _words(part):
                    if self._breaks(space, word, width):
                        out, self._line, space = f"{out}\n", "", ""
                    out, self._line, space = out + space + word, self._line + space + word, ""
        self._line += space
        return out + space

    def _breaks(self, space: str, word: str, width: int) -> bool:
        if self._code or not self._line.strip():
            return False
        between = space or self._line[-1].isspace() or _is_wide(self._line) or _is_wide(word)
        return bool(between) and _columns(self._line + space + word) > width


def _words(text: str) -> list[str]:
    """The units of a text without spaces, between which a line may break."""
    if text.isascii():
        return [text]
    units = [""]
    for character in text:
        if _is_wide(character) or _is_wide(units[-1]):
            units.append(character)
        else:
            units[-1] += character
    return [unit for unit in units if unit]


def _is_wide(text: str) -> bool:
    return bool(text) and not text.isascii() and _columns(text[-1]) == 2


def _columns(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text.expandtabs(8))
