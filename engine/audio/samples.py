"""Arrays of numbers as mono samples, and errors for other arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.audio.resampling import Samples
from engine.errors import InvalidRequestError
from engine.interface.values import brief

MOST_CHANNELS = 32
_LOUDEST = 1e12  # far above unscaled integers; spectra of larger numbers overflow
_SCALES = {"uint8": (128, 128), "int8": (0, 2**7), "int16": (0, 2**15), "int32": (0, 2**31)}  # middle, maximum


def fault_of(samples: Samples) -> str:
    """The reason why samples are not valid sound; "" if they are."""
    if not np.isfinite(samples).all():
        return "it contains numbers that are not samples (infinite, or not a number)"
    loudest = float(np.abs(samples).max(initial=0.0))
    if loudest > _LOUDEST:
        return f"it contains {loudest:.3g}, but samples must be from -1 to 1"
    return ""


def mono_samples(sound: Any, name: str) -> Samples:
    """An array as float32 samples: channels are averaged and integers scaled, as for a file. Raises InvalidRequestError
    if the array has another form, or is not valid sound. `sound`: [samples] or [samples, channels]."""
    if not isinstance(sound, np.ndarray):
        hint = {"Tensor": "call its .numpy()", "list": "numpy.asarray(…, 'float32') converts a list of numbers"}
        reads = "soundfile.read(…, dtype='float32') reads a file"
        kind = type(sound).__name__
        raise _refusal(f"{name} must be a numpy array, got {brief(sound)} ({kind}); {hint.get(kind, reads)}.")
    if sound.ndim not in (1, 2) or (sound.ndim == 2 and not 1 <= sound.shape[1] <= MOST_CHANNELS):
        raise _refusal(
            f"{name} must have the shape [samples], or [samples, channels] with at most {MOST_CHANNELS} channels, got "
            f"{list(sound.shape)}. If the channels come first, transpose it."
        )
    kind = sound.dtype.name
    if kind in _SCALES:
        middle, most = _SCALES[kind]
        sound = (sound.astype(np.float64) - middle) / most
    elif sound.dtype.kind != "f":
        raise _refusal(f"{name} must hold floats from -1 to 1, or {', '.join(_SCALES)}, got {kind}.")
    with np.errstate(over="ignore"):  # values too large for float32 are reported below
        samples: Samples = sound.astype(np.float32)
    if fault := fault_of(samples):
        raise _refusal(f"{name} cannot be used: {fault}.")
    return samples.mean(axis=1, dtype=np.float32) if samples.ndim == 2 else samples


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="sounds", code="invalid_audio")
