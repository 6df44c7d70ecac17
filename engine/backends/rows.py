"""The rows that a program's operations read and write."""

from __future__ import annotations

from typing import NamedTuple


class Rows(NamedTuple):
    """Part of a buffer: `width` features per token, from `offset` on, in rows of `stride`."""

    buffer: int
    offset: int
    width: int
    stride: int

    def part(self, offset: int, width: int) -> Rows:
        """A part of the features, as rows."""
        return Rows(self.buffer, self.offset + offset, width, self.stride)
