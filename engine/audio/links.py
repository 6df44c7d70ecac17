"""Files made by joining several: chained Ogg, and FLAC after FLAC. libsndfile reads only the first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.audio.flac import MARK

# Bytes of a page's header without its table; the flags of a stream's first and last page.
_PAGE, _BEGINS, _ENDS = 27, 2, 4


def links(data: bytes, form: str) -> list[bytes]:
    """The files that a joined file consists of, in order; the file itself if it is a single one. `form`: OGG, FLAC, or
    another format, whose files are never joined."""
    starts = {"OGG": _ogg_starts, "FLAC": _flac_starts}.get(form, lambda _: [])(data)[1:]
    if not starts:
        return [data]
    return [data[start:end] for start, end in zip([0, *starts], [*starts, len(data)], strict=True)]


def check_end(data: bytes) -> None:
    """Refuse an Ogg file without its last page. Raises ValueError if the file is cut off."""
    for at, end in deque(_pages(data), maxlen=1):
        if end <= len(data) and data[at + 5] & _ENDS:
            return
        raise ValueError("it is truncated: its last page is incomplete or not marked as the last one")


def _flac_starts(data: bytes) -> list[int]:
    return [found.start() for found in MARK.finditer(data)]


def _ogg_starts(data: bytes) -> list[int]:
    """The positions where a stream begins after pages of another; streams that begin together are interleaved."""
    starts: list[int] = []
    begins = False
    for at, _ in _pages(data):
        before, begins = begins, bool(data[at + 5] & _BEGINS)
        if begins and not before:
            starts.append(at)
    return starts


def _pages(data: bytes) -> Iterator[tuple[int, int]]:
    """The position where each page begins, and where it should end."""
    at = data.find(b"OggS")
    while 0 <= at <= len(data) - _PAGE:
        count = data[at + 26]
        end = at + _PAGE + count + sum(data[at + _PAGE : at + _PAGE + count])
        yield at, end
        at = data.find(b"OggS", end)
