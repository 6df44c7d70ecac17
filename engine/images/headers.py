"""Height and width in the header of an image file, to count an image's tokens before it is decoded. No other decision
depends on the result, so a false header gains nothing."""

from __future__ import annotations

import base64
import binascii
import struct

from engine.images.decoding import data_of, webp_size
from engine.interface.vision import Size

_FIRST, _MOST = 256, 1 << 16  # base64 characters to read of any file; of a JPEG
_FRAMES = frozenset({*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)})
_EXIF, _ORIENTATION = 0xE1, 0x0112
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})


def header_size(text: str) -> Size | None:
    """Height and width of an image in a `data:` URL or in base64. None if its first bytes do not contain them."""
    head = _decoded(data_of(text, _FIRST))
    if head.startswith(b"\xff\xd8"):
        found = _jpeg(_decoded(data_of(text, _MOST)))
    else:
        found = _others(head)
    return None if found is None or min(found) < 1 else found


def _others(head: bytes) -> Size | None:
    if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR" and len(head) >= 24:
        width, height = struct.unpack_from(">II", head, 16)
        return height, width
    if head.startswith((b"GIF87a", b"GIF89a")) and len(head) >= 10:
        width, height = struct.unpack_from("<HH", head, 6)
        return height, width
    if head.startswith(b"BM") and len(head) >= 26 and struct.unpack_from("<I", head, 14)[0] >= 40:
        width, height = struct.unpack_from("<ii", head, 18)
        return abs(height), width  # a negative height means that rows start at the top
    if (size := webp_size(head)) is not None:
        return size[1], size[0]
    return None


def _jpeg(data: bytes) -> Size | None:
    """Height and width in the first frame's header, as EXIF data before it turn the image."""
    place, turned = 2, False
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # a fill byte
            place += 1
        elif marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, place + 5)
            return (width, height) if turned else (height, width)
        elif marker in _BARE:
            place += 2
        else:
            end = place + 2 + max(struct.unpack_from(">H", data, place + 2)[0], 2)
            if marker == _EXIF and data.startswith(b"Exif\0\0", place + 4):
                turned = _lies(data[place + 10 : end])
            place = end
    return None


def _lies(tiff: bytes) -> bool:
    """Whether the orientation in EXIF data turns an image by 90 degrees."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return False
    (place,) = struct.unpack_from(f"{order}I", tiff, 4)
    if place + 2 > len(tiff):
        return False
    (count,) = struct.unpack_from(f"{order}H", tiff, place)
    for entry in range(place + 2, min(place + 2 + 12 * count, len(tiff) - 11), 12):
        tag, kind, _, value = struct.unpack_from(f"{order}HHIH", tiff, entry)
        if (tag, kind) == (_ORIENTATION, 3):
            return value in range(5, 9)
    return False


def _decoded(text: str) -> bytes:
    text = "".join(text.split())
    try:
        return base64.b64decode(text[: len(text) // 4 * 4])
    except (binascii.Error, ValueError):
        return b""
