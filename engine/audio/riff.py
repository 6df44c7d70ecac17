"""WAV files whose header states how much sound they have; a program that writes to a pipe, or is interrupted, leaves a
wrong size.

If a file states more than it has, libsndfile reads the part that exists. If it states nothing, libsndfile reads
nothing.
"""

from __future__ import annotations

from typing import Literal

_ORDERS: dict[bytes, Literal["little", "big"]] = {b"RIFF": "little", b"RIFX": "big"}
_CHUNKS = 12  # bytes before the first chunk
_UNTOLD = 0x7F00_0000  # bytes from which on a size means "unknown": programs write several such numbers


def counted(data: bytes) -> bytes:
    """The file itself, or a copy with the right size if its header was never finished. Raises ValueError if the header
    states more than there is."""
    order = _ORDERS.get(data[:4])
    at = _CHUNKS
    while order is not None and at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], order)
        if data[at : at + 4] == b"data":
            there = len(data) - at - 8
            whole = int.from_bytes(data[4:8], order)
            if size == 0 and there and whole != len(data) - 8:  # otherwise chunks without sound may follow
                return data[: at + 4] + there.to_bytes(4, order) + data[at + 8 :]
            if there + 1 < size < _UNTOLD:  # the last byte may be padding
                raise ValueError(f"it is truncated: its header promises {size} bytes of audio, but it has {there}")
            break
        at += 8 + size + size % 2
    return data
