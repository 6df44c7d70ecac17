"""Log-mel spectra of windows of sound, in the form that Whisper reads (arXiv:2212.04356)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.audio.resampling import Samples
from engine.errors import ModelLoadError

_FILE = "preprocessor_config.json"
_LEAST = 1e-10  # minimum power before the logarithm
_AT_ONCE = 4  # windows whose features are computed at a time
_SLICE = 240  # frames whose spectra fit into a core's cache
_PIECE = 8  # frames of a product that is too small for threads of its own, which other work would delay
_DEPTH = 8.0  # orders of magnitude below a window's largest value that are kept


@dataclass(frozen=True)
class LogMel:
    """Computes features of sound."""

    bins: int = 80
    rate: int = 16_000  # samples per second
    # fft, hop: samples per frame, and from one frame to the next
    fft: int = 400
    hop: int = 160
    seconds: int = 30  # length of a window

    @property
    def window_samples(self) -> int:
        return self.seconds * self.rate

    @property
    def frames(self) -> int:
        return self.window_samples // self.hop

    def frames_of(self, count: int) -> int:
        """The number of frames that begin within this many samples."""
        return -(-count // self.hop)

    @cached_property
    def _filters(self) -> NDArray[np.float32]:
        return mel_filters(self.bins, self.fft, self.rate)

    def features(self, samples: Samples) -> NDArray[np.float32]:
        """[bins, frames] of one window; a shorter one is padded with silence. Raises ValueError if it is longer than a
        window."""
        if len(samples) > self.window_samples:
            raise ValueError(f"a window may have at most {self.window_samples} samples, got {len(samples)}")
        # Frames are centred on their positions, and the sound is mirrored at both ends.
        half = self.fft // 2
        sound = np.zeros(self.window_samples, dtype=np.float32)
        sound[: len(samples)] = samples
        frames = np.lib.stride_tricks.sliding_window_view(np.pad(sound, half, mode="reflect"), self.fft)[:: self.hop]
        power = np.zeros((-(-self.frames // _PIECE) * _PIECE, half + 1), dtype=np.float32)
        for start in range(0, self.frames, _SLICE):
            part = slice(start, min(start + _SLICE, self.frames))
            spectrum = np.fft.rfft(frames[part] * _hann(self.fft))  # in float32, like the reference
            power[part] = np.abs(spectrum) ** 2
        mel = power.reshape(-1, _PIECE, half + 1) @ self._filters.T
        logs = np.log10(np.maximum(mel.reshape(-1, self.bins)[: self.frames].T, _LEAST))
        logs = np.maximum(logs, logs.max() - _DEPTH)
        return np.asarray((logs + 4.0) / 4.0, dtype=np.float32, order="C")

    def features_of_all(self, windows: Iterable[Samples]) -> list[NDArray[np.float32]]:
        """`features` of several windows, some in parallel, because transforms release Python's lock. Raises ValueError
        if a window is too long."""
        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            return list(pool.map(self.features, windows))


@lru_cache(maxsize=4)
def _hann(size: int) -> NDArray[np.float32]:
    return np.asarray(0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(size) / size), dtype=np.float32)


def mel_filters(bins: int, fft: int, rate: int) -> NDArray[np.float32]:
    """[bins, fft // 2 + 1] triangles of equal area on Slaney's mel scale from 0 to 8,000 Hz (Auditory Toolbox)."""
    # Linear up to 1,000 Hz, which is 15 mel, and from there 27 mel for a factor of 6.4.
    low, step = 1000.0, np.log(6.4) / 27.0

    def to_hertz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(mel < 15.0, mel * (200.0 / 3.0), low * np.exp(step * (mel - 15.0)))

    highest = 15.0 + np.log(8000.0 / low) / step
    corners = to_hertz(np.linspace(0.0, highest, bins + 2))
    places = np.linspace(0.0, rate // 2, fft // 2 + 1)
    rising = (places[None] - corners[:-2, None]) / np.diff(corners)[:-1, None]
    falling = (corners[2:, None] - places[None]) / np.diff(corners)[1:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (corners[2:] - corners[:-2]))[:, None]
    return np.asarray(triangles, dtype=np.float32)


def load_log_mel(folder: Path) -> LogMel:
    """The feature computer that a checkpoint's `preprocessor_config.json` describes. Raises ModelLoadError if the file
    is missing, or has a setting that is not supported here."""
    path = folder / _FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}, which defines how audio is prepared, cannot be read: {error}") from error
    if not isinstance(stored, dict) or stored.get("feature_extractor_type") != "WhisperFeatureExtractor":
        raise ModelLoadError(f"{path}: feature_extractor_type must be WhisperFeatureExtractor.")
    fixed = {"do_normalize": (False, None), "dither": (0, None), "padding_value": (0, None)}
    for name, allowed in fixed.items():
        if stored.get(name) not in allowed:
            raise ModelLoadError(f"{path} sets {name} to {stored[name]!r}; it must be {allowed[0]} or left out.")
    default = LogMel()
    names = {"bins": "feature_size", "rate": "sampling_rate", "fft": "n_fft", "hop": "hop_length"}
    values = {own: stored.get(name, getattr(default, own)) for own, name in names.items()}
    values["seconds"] = stored.get("chunk_length", default.seconds)
    for own, value in values.items():
        if type(value) is not int or value < 1:
            raise ModelLoadError(f"{path} sets {names.get(own, 'chunk_length')} to {value!r}; it must be above 0.")
    return LogMel(**values)
