"""FLAC files with a stated length. Programs that write to a pipe cannot state it (RFC 9639, sections 8.2 and 9.1).

libsndfile reads a file without a stated length only up to its last block, and reports no length before.
"""

from __future__ import annotations

import re

MARK = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")  # the mark, and the header of the first block
_INFO, _TOTAL = 8, 22  # bytes from the mark to that block, and to the last four of the five bytes that count samples
_SYNC = re.compile(rb"\xff[\xf8\xf9]")
_MOST = 1 << 21  # bytes of the largest frame
_TRIES = 16  # positions that look like the beginning of the last frame


def counted(data: bytes) -> bytes:
    """The file itself if it states its number of samples or its last frame is damaged; otherwise a copy with that
    number, which follows from the last frame."""
    mark = MARK.search(data)
    if mark is None or len(data) < mark.start() + _TOTAL + 4:
        return data
    at = mark.start() + _TOTAL
    if data[at - 1] & 0x0F or any(data[at : at + 4]):
        return data
    block = int.from_bytes(data[mark.start() + _INFO + 2 : mark.start() + _INFO + 4], "big")
    total = _samples(data, at + 4, block)
    if not 0 < total < 1 << 36:
        return data
    return (
        data[: at - 1] + bytes((data[at - 1] | total >> 32,)) + (total & 0xFFFFFFFF).to_bytes(4, "big") + data[at + 4 :]
    )


def _samples(data: bytes, begin: int, block: int) -> int:
    """The number of samples up to the end of the last frame; 0 if the frame is not found.

    Args:
        begin: the first possible position of a frame.
        block: samples per frame, if all frames but the last have the same number.
    """
    end = len(data) - (128 if data[-128:-125] == b"TAG" else 0)
    places = [found.start() for found in _SYNC.finditer(data, max(begin, end - _MOST), end)]
    tries = 0
    for at in reversed(places):
        if (found := _head(data[at : at + 16], block)) is not None:
            tries += 1
            if _crc(data[at:end], _CRC_16, 16) == 0:
                return found
            if tries == _TRIES:
                break
    return 0


def _head(head: bytes, block: int) -> int | None:
    """The number of samples up to the end of a frame with this header; None if it is not a frame."""
    sizes, rates = head[2] >> 4 if len(head) > 4 else 0, head[2] & 15 if len(head) > 4 else 15
    if not sizes or rates == 15:
        return None
    ones = 8 - (head[4] ^ 0xFF).bit_length()  # as in UTF-8: the number of bytes
    if ones in (1, 8):
        return None
    at = 4 + max(ones, 1)
    number = head[4] & (0x7F >> ones)
    for byte in head[5:at]:
        number = number << 6 | byte & 0x3F
    explicit = {6: 1, 7: 2}.get(sizes, 0)
    size = int.from_bytes(head[at : at + explicit], "big") + 1
    if not explicit:
        size = 192 if sizes == 1 else 576 << sizes - 2 if sizes < 6 else 256 << sizes - 8
    at += explicit + {12: 1, 13: 2, 14: 2}.get(rates, 0)
    if at >= len(head) or _crc(head[: at + 1], _CRC_8, 8):
        return None
    return (number if head[1] & 1 else number * block) + size


def _crc(data: bytes, table: list[int], bits: int) -> int:
    """0 for data that ends with its own checksum."""
    found, shift, mask = 0, bits - 8, (1 << bits) - 1
    for byte in data:
        found = (found << 8 & mask) ^ table[found >> shift ^ byte]
    return found


def _table(polynomial: int, bits: int) -> list[int]:
    found = []
    for byte in range(256):
        value = byte << bits - 8
        for _ in range(8):
            value = (value << 1) ^ (polynomial if value >> bits - 1 else 0)
            value &= (1 << bits) - 1
        found.append(value)
    return found


_CRC_8, _CRC_16 = _table(0x07, 8), _table(0x8005, 16)
