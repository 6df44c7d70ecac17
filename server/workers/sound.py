"""Files of sound as samples: the job of a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from engine.audio.decoding import decode_part


class SoundPart(msgspec.Struct, array_like=True):
    """The input.

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
    with _unheard():
        samples, seconds = decode_part(
            part.data, rate=part.rate, start=part.start, count=part.count, most_seconds=part.most_seconds
        )
    return DecodedPart(samples.tobytes(), seconds)


@contextmanager
def _unheard() -> Iterator[None]:
    """Discard what is written to stderr meanwhile: libsndfile's decoder of MP3 writes lines for every broken frame."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
