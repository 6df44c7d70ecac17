"""Sound for speech models: resampling, windows, spectra, and requests to speech models."""

from __future__ import annotations

import numpy as np

from engine.audio.cutting import Cutter, Window
from engine.audio.features import LogMel, load_log_mel
from engine.audio.languages import language_code, language_name
from engine.audio.resampling import Resampler, Samples
from engine.audio.transcribing import (
    Answer,
    Asking,
    Placing,
    Question,
    Segment,
    Thresholds,
    Transcription,
    check_alignment,
    said,
    segments_of,
)
from engine.audio.words import Word, words_of
from engine.interface.outputs import SpeechTask

__all__ = [
    "Answer", "Asking", "Cutter", "LogMel", "Placing", "Question", "Resampler", "Samples", "Segment", "SpeechTask",
    "Thresholds", "Transcription", "Window", "Word", "check_alignment", "language_code", "language_name",
    "load_log_mel", "said", "samples_of", "segments_of", "words_of",
]  # fmt: skip


def samples_of(data: bytes) -> Samples:
    """Float32 samples in this machine's byte order."""
    return np.frombuffer(data, dtype=np.float32)
