"""Decodes sound files into samples; the job of a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from engine.audio.decoding import decode_part


class SoundPart(msgspec.Struct, array_like=True):
    """The input."""

    data: bytes
    rate: int  # samples per second of the result
    # start, count: the first sample of the result, and the number of samples
    start: int
    count: int
    most_seconds: float  # a longer file is not decoded


class DecodedPart(msgspec.Struct, array_like=True):
    """A part of a file's sound."""

    samples: bytes  # float32 in this machine's byte order, mono; fewer than requested at the end of the file
    seconds: float  # the length of the whole file


def decode(part: SoundPart) -> DecodedPart:
    """Samples of a file. Raises ValueError with the reason if the file is not sound in a supported format, or is
    damaged."""
    with _unheard():
        samples, seconds = decode_part(
            part.data, rate=part.rate, start=part.start, count=part.count, most_seconds=part.most_seconds
        )
    return DecodedPart(samples.tobytes(), seconds)


@contextmanager
def _unheard() -> Iterator[None]:
    """Discard output to stderr meanwhile, because libsndfile's MP3 decoder writes lines for every damaged frame."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
