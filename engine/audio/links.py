"""Files in which several were joined: Ogg's chains, and FLAC behind FLAC. libsndfile reads the first only."""

from __future__ import annotations

from engine.audio.flac import MARK

_PAGE, _BEGINS = 27, 2  # bytes of a page's head without its table; the flag of a stream's first page


def links(data: bytes, form: str) -> list[bytes]:
    """The files that a file consists of, in their order; itself where it is one.

    Args:
        form: OGG, FLAC, or any other, of which none are joined.
    """
    starts = {"OGG": _ogg_starts, "FLAC": _flac_starts}.get(form, lambda _: [])(data)[1:]
    if not starts:
        return [data]
    return [data[start:end] for start, end in zip([0, *starts], [*starts, len(data)], strict=True)]


def _flac_starts(data: bytes) -> list[int]:
    return [found.start() for found in MARK.finditer(data)]


def _ogg_starts(data: bytes) -> list[int]:
    """Where a stream begins behind pages of another; streams that begin together lie in each other."""
    starts: list[int] = []
    at, begins = data.find(b"OggS"), False
    while 0 <= at <= len(data) - _PAGE:
        before, begins = begins, bool(data[at + 5] & _BEGINS)
        if begins and not before:
            starts.append(at)
        table = data[at + _PAGE : at + _PAGE + data[at + 26]]
        at = data.find(b"OggS", at + _PAGE + len(table) + sum(table))
    return starts
