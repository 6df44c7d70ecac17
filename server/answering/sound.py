"""Splits an uploaded file into windows of sound; workers decode a part at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

from engine import ModelLoadError
from engine.audio import Cutter, LogMel, Window, load_log_mel, samples_of
from server.errors import ApiError
from server.workers.pool import RefusedError, WorkerLostError, WorkerPool, shared_workers
from server.workers.sound import DecodedPart, SoundPart

PART = 60  # seconds of sound that a worker decodes at a time: 4 MB, of which this process briefly has a few copies
PART_TIME = 15.0  # seconds that one part may take
BUDGET = 15.0  # seconds that all parts of a file may take together, and ...
BUDGET_SHARE = 1 / 20  # ... additional seconds per second of sound


@lru_cache(maxsize=8)
def find_log_mel(model_path: str) -> LogMel | str:
    """The object that prepares sound for a model, or the reason why this is impossible, for clients."""
    try:
        return load_log_mel(Path(model_path))
    except ModelLoadError as problem:
        return str(problem).replace(f"{Path(model_path)}/", "")  # clients need not know the model's path


async def windows(
    content: bytes,
    log_mel: LogMel,
    most_seconds: float,
    turn: AbstractAsyncContextManager[Any],
    workers: WorkerPool | None = None,
) -> AsyncGenerator[Window, None]:
    """The windows of a file's sound, in order; a part is decoded only when the windows before it have been taken.
    Raises ApiError if the file is not sound, is too long, or takes a worker too much time or memory."""
    pool, cutter, rate = workers or shared_workers(), Cutter(log_mel.window_samples, log_mel.rate), log_mel.rate
    start, count, spent, budget = 0, PART * rate, 0.0, BUDGET
    while True:
        async with turn:
            began = monotonic()
            left = min(PART_TIME, budget - spent)
            part = await _decoded(pool, SoundPart(content, rate, start, count, most_seconds), left)
            spent += monotonic() - began
        budget = BUDGET + part.seconds * BUDGET_SHARE
        if part.seconds > most_seconds:  # known before the first window
            raise too_long(part.seconds, most_seconds)
        samples = samples_of(part.samples)
        start += len(samples)
        for window in cutter.add(samples):
            yield window
        if len(samples) < count:
            break
    if not start:
        raise _refusal("it contains no sound")
    for window in cutter.end():
        yield window


async def _decoded(pool: WorkerPool, part: SoundPart, seconds: float) -> DecodedPart:
    try:
        if seconds <= 0:
            raise TimeoutError
        return await pool.run("sound", part, DecodedPart, seconds)
    except RefusedError as problem:
        raise _refusal(str(problem)) from None
    except TimeoutError:
        what = f"decoding {PART} seconds of it takes more than {PART_TIME:g} seconds"
        if seconds < PART_TIME:
            what = f"decoding it takes more than {BUDGET:g} seconds plus {BUDGET_SHARE:.0%} of its length"
        raise _refusal(what) from None
    except WorkerLostError:
        raise _refusal("decoding it takes too much memory") from None


def too_long(seconds: float, most: float) -> ApiError:
    message = (
        f"file: the sound has {seconds:.0f} seconds or more, but the limit is {most:g} (max_audio_seconds). Send it "
        "in parts, or raise --max-audio-seconds."
    )
    return ApiError(413, message, param="file", code="audio_too_long")


def _refusal(reason: str) -> ApiError:
    return ApiError(400, f"file cannot be used: {reason.rstrip('.')}.", param="file", code="invalid_audio")
