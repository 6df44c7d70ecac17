"""Files of sound as samples of one rate, a part at a time, by libsndfile."""

from __future__ import annotations

import io

import numpy as np
import soundfile

from engine.audio.resampling import Resampler, Samples

FORMATS = {"WAV": "wav", "WAVEX": "wav", "FLAC": "flac", "MP3": "mp3", "OGG": "ogg"}
RATES = (4_000, 384_000)  # samples a second that a file may have
MOST_CHANNELS = 32
_BLOCK = 1 << 20  # numbers that are read at a time
_UNKNOWN = 1 << 40  # frames: more than any file has, so that they are only not known


def decode_part(
    data: bytes, *, rate: int, start: int = 0, count: int, most_seconds: float
) -> tuple[Samples, float | None]:
    """Mono samples of a file, channels averaged, and how many seconds the file says that it has (None: it does not).

    Args:
        data: the file.
        rate: samples a second of the result.
        start, count: the first sample of the result, and how many; there are fewer where the file ends.
        most_seconds: of a file that says that it is longer nothing is decoded.

    Raises:
        ValueError: it is no sound in a format that is read here, or broken; says so.
    """
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            return _decode(file, rate, start, count, most_seconds)
    except (soundfile.SoundFileError, RuntimeError) as problem:  # libsndfile's, and its way of telling Python's own
        raise ValueError(f"it is no sound that can be decoded: {str(problem).rpartition(': ')[2][:200]}") from None


def _decode(
    file: soundfile.SoundFile, rate: int, start: int, count: int, most_seconds: float
) -> tuple[Samples, float | None]:
    if file.format not in FORMATS:
        known = ", ".join(sorted(set(FORMATS.values())))
        raise ValueError(f"its format is {file.format}, and those that are read are {known}")
    if not RATES[0] <= file.samplerate <= RATES[1]:
        raise ValueError(f"it has {file.samplerate} samples a second, and {RATES[0]} to {RATES[1]} are read")
    if file.channels > MOST_CHANNELS:
        raise ValueError(f"it has {file.channels} channels, and {MOST_CHANNELS} at most are read")
    seconds = file.frames / file.samplerate if 0 < file.frames < _UNKNOWN else None
    nothing: Samples = np.zeros(0, dtype=np.float32)
    if seconds is not None and seconds > most_seconds:
        return nothing, seconds
    resampler = Resampler(file.samplerate, rate)
    end = start + count
    first = resampler.first_needed(start)
    source = _read(file, first, resampler.last_needed(end))
    end = min(end, resampler.length(first + len(source)))
    return (resampler.block(source, first, start, end) if end > start else nothing), seconds


def _read(file: soundfile.SoundFile, first: int, end: int) -> Samples:
    """Mono samples from frame `first` up to, without, `end`, or the end of the file."""
    parts: list[Samples] = []
    if first and (file.frames <= first or file.seek(first) != first):
        return np.zeros(0, dtype=np.float32)
    while first < end:
        block = file.read(min(end - first, _BLOCK // file.channels), dtype="float32", always_2d=True)
        if not len(block):
            break
        if not np.isfinite(block).all():
            raise ValueError("it holds numbers that are no sound (infinite, or not a number)")
        parts.append(block.mean(axis=1, dtype=np.float32))
        first += len(block)
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
