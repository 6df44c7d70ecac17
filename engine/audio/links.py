"""Files in which several were joined: Ogg's chains, and FLAC behind FLAC. libsndfile reads the first only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.audio.flac import MARK

# Bytes of a page's head without its table; the flags of a stream's first and last page.
_PAGE, _BEGINS, _ENDS = 27, 2, 4


def links(data: bytes, form: str) -> list[bytes]:
    """The files that a file consists of, in their order; itself where it is one.

    Args:
        form: OGG, FLAC, or another format, whose files are never joined.
    """
    starts = {"OGG": _ogg_starts, "FLAC": _flac_starts}.get(form, lambda _: [])(data)[1:]
    if not starts:
        return [data]
    return [data[start:end] for start, end in zip([0, *starts], [*starts, len(data)], strict=True)]


def check_end(data: bytes) -> None:
    """Refuse an Ogg file whose last page is not there.

    Raises:
        ValueError: it breaks off.
    """
    for at, end in deque(_pages(data), maxlen=1):
        if end <= len(data) and data[at + 5] & _ENDS:
            return
        raise ValueError("it is truncated: its last page is incomplete or not marked as the last one")


def _flac_starts(data: bytes) -> list[int]:
    return [found.start() for found in MARK.finditer(data)]


def _ogg_starts(data: bytes) -> list[int]:
    """The places where a stream begins behind pages of another; streams that begin together lie in each other."""
    starts: list[int] = []
    begins = False
    for at, _ in _pages(data):
        before, begins = begins, bool(data[at + 5] & _BEGINS)
        if begins and not before:
            starts.append(at)
    return starts


def _pages(data: bytes) -> Iterator[tuple[int, int]]:
    """The place where each page begins, and where it should end."""
    at = data.find(b"OggS")
    while 0 <= at <= len(data) - _PAGE:
        count = data[at + 26]
        end = at + _PAGE + count + sum(data[at + _PAGE : at + _PAGE + count])
        yield at, end
        at = data.find(b"OggS", end)
