"""Sound for models that hear: other rates, windows, spectra, and what speech models are asked."""

from __future__ import annotations

import numpy as np

from engine.audio.cutting import Cutter, Window
from engine.audio.features import LogMel, load_log_mel
from engine.audio.languages import language_code, language_name
from engine.audio.resampling import Resampler, Samples
from engine.audio.transcribing import (
    Answer,
    Asking,
    Question,
    Segment,
    SpeechTask,
    Thresholds,
    Transcription,
    said,
    segments_of,
)

__all__ = [
    "Answer", "Asking", "Cutter", "LogMel", "Question", "Resampler", "Samples", "Segment", "SpeechTask", "Thresholds",
    "Transcription", "Window", "language_code", "language_name", "load_log_mel", "said", "samples_of", "segments_of",
]  # fmt: skip


def samples_of(data: bytes) -> Samples:
    """Float32 samples in this machine's byte order."""
    return np.frombuffer(data, dtype=np.float32)
