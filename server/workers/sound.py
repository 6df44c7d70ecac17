"""Files of sound as samples: the job of a worker."""

from __future__ import annotations

import msgspec

from engine.audio.decoding import decode_part


class SoundPart(msgspec.Struct, array_like=True):
    """What is asked for.

    Attributes:
        data: the file.
        rate: samples a second of the result.
        start, count: the first sample of the result, and how many.
        most_seconds: of a longer file nothing is decoded.
    """

    data: bytes
    rate: int
    start: int
    count: int
    most_seconds: float


class DecodedPart(msgspec.Struct, array_like=True):
    """A part of a file's sound.

    Attributes:
        samples: float32 in this machine's byte order, mono; fewer than asked for where the file ends.
        seconds: how long the whole file is.
    """

    samples: bytes
    seconds: float


def decode(part: SoundPart) -> DecodedPart:
    """Samples of a file.

    Raises:
        ValueError: it is no sound in a format that is read here, or broken; says so.
    """
    samples, seconds = decode_part(
        part.data, rate=part.rate, start=part.start, count=part.count, most_seconds=part.most_seconds
    )
    return DecodedPart(samples.tobytes(), seconds)
