"""MP3 files with a header that counts all of their frames.

Without such a header, libsndfile guesses the length from the first frame and reads no further. With the header of the
first of several joined files, it reads no further than that file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

_KILOBITS = (
    (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),  # MPEG-2, and 2.5
    (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
)
_RATES = (44_100, 48_000, 32_000)
_SYNC = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]|ID3")  # a layer III frame, or a tag
_CHAIN = 3  # consecutive frames: fewer may be a coincidence
_OWN_BITRATE = 8 << 4  # of the header's frame: large enough for the header at each rate


def counted(data: bytes) -> bytes:
    """The file itself if its header counts its frames; otherwise its frames after a new header that does.

    The new file leaves out everything that is not a frame (tags, damage), and the headers of joined files. Raises
    ValueError if the rate, the version or mono changes within the file, or the file ends before its header says.
    """
    if _is_whole(data):
        return data
    runs: list[tuple[int, int]] = []
    kind, frames, headers = None, 0, list[tuple[int, int]]()
    for at, end, is_header in _frames(data):
        if kind is None:
            kind, first = _kind(data, at), data[at : at + 4]
        elif _kind(data, at) != kind:
            raise ValueError(
                "its sample rate or number of channels changes in the middle, as in joined files. Send the files "
                "separately, or convert the file to one format"
            )
        if is_header:
            headers.append((at, frames))
        elif runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((at, end))
        frames += not is_header
    if kind is None:
        return data
    if len(headers) == 1 and headers[0][1] == 0:
        at = headers[0][0]
        claimed, size = _claimed(data, at), _claimed_bytes(data, at)
        # If nothing is missing, a count may be too large: frames are damaged, or a tag's bytes are included.
        if claimed > frames + 1 and size > len(data) - at:
            raise ValueError(f"it is truncated: its header promises {claimed} frames, but it has {frames}")
        if claimed >= frames:
            return data
    return _header(first, frames) + b"".join(data[at:end] for at, end in runs)


def _is_whole(data: bytes) -> bool:
    """Whether the file begins with a header that counts frames, and bytes up to the file's end: the common case."""
    at = _resume(data, 0)
    if at is None or not _is_header(data, at) or not _claimed(data, at):
        return False
    size = _claimed_bytes(data, at)
    rest = data[at + size :]
    return 0 < size <= len(data) - at and (not rest or (len(rest) == 128 and rest.startswith(b"TAG")))


def _frames(data: bytes) -> Iterator[tuple[int, int, bool]]:
    """The beginning and the end of each frame, and whether it is a header."""
    at = _resume(data, 0)
    while at is not None:
        kind, length = _kind(data, at), _length(data[at + 1], data[at + 2])
        while length and at + length <= len(data):
            yield at, at + length, _is_header(data, at)
            at += length
            length = _length(data[at + 1], data[at + 2]) if _kind(data, at) == kind else 0
        at = _resume(data, at)


def _resume(data: bytes, at: int) -> int | None:
    """The position at or after `at` where frames continue; frames without successors end the file."""
    while (found := _SYNC.search(data, at)) is not None:
        at = found.start()
        if found[0] == b"ID3" and len(data) >= at + 10:
            a, b, c, d = data[at + 6 : at + 10]
            at += 10 + (a << 21 | b << 14 | c << 7 | d)
            continue
        kind, end = _kind(data, at), at
        for _ in range(_CHAIN):
            length = _length(data[end + 1], data[end + 2]) if kind is not None and _kind(data, end) == kind else 0
            end += length
            if not length or end >= len(data):
                break
        if length and end <= len(data):
            return at
        at += 1
    return None


def _kind(data: bytes, at: int) -> tuple[int, int, bool] | None:
    """Version, rate, and whether it is mono; None if no layer III frame begins here."""
    if at + 4 > len(data) or data[at] != 0xFF or not _length(data[at + 1], data[at + 2]):
        return None
    return data[at + 1] & 0x18, data[at + 2] & 0x0C, data[at + 3] >> 6 == 3


@cache
def _length(second: int, third: int) -> int:
    """Bytes of a frame, from the second and third byte of its header; 0 if these do not belong to a layer III frame."""
    version, bitrate, rate = second >> 3 & 3, third >> 4, third >> 2 & 3
    if second & 0xE6 != 0xE2 or version == 1 or bitrate in (0, 15) or rate == 3:
        return 0
    first = version == 3
    hertz = _RATES[rate] >> (0 if first else 1 if version == 2 else 2)
    return (144 if first else 72) * _KILOBITS[first][bitrate - 1] * 1000 // hertz + (third >> 1 & 1)


def _place(second: int, fourth: int) -> int:
    """The position of the counting header in its frame."""
    first, mono = second >> 3 & 3 == 3, fourth >> 6 == 3
    return 4 + ((17 if mono else 32) if first else (9 if mono else 17))


def _is_header(data: bytes, at: int) -> bool:
    place = at + _place(data[at + 1], data[at + 3])
    return data[place : place + 4] in (b"Xing", b"Info") or data[at + 36 : at + 40] == b"VBRI"


def _claimed(data: bytes, at: int) -> int:
    """The number of frames that a header states; 0 if it states none."""
    place = at + _place(data[at + 1], data[at + 3])
    tells = data[place : place + 4] in (b"Xing", b"Info") and data[place + 7] & 1
    return int.from_bytes(data[place + 8 : place + 12], "big") if tells else 0


def _claimed_bytes(data: bytes, at: int) -> int:
    """The number of bytes that a header states, from its beginning; 0 if it states none."""
    place = at + _place(data[at + 1], data[at + 3])
    tells = data[place : place + 4] in (b"Xing", b"Info") and data[place + 7] & 2
    after = place + (12 if data[place + 7] & 1 else 8)  # the frame count comes first, if present
    return int.from_bytes(data[after : after + 4], "big") if tells else 0


def _header(first: bytes, frames: int) -> bytes:
    """A counting header for frames like the one with these four bytes."""
    second, third = first[1] | 1, _OWN_BITRATE | first[2] & 0x0C
    head = bytes((first[0], second, third, first[3])).ljust(_place(second, first[3]), b"\0")
    return (head + b"Info" + (1).to_bytes(4, "big") + frames.to_bytes(4, "big")).ljust(_length(second, third), b"\0")
