"""Resamples sound in blocks: the value of a sample depends only on its position, not on how the sound was cut."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

_ZEROS = 16  # zero crossings of the sinc on each side of its middle
_ROLLOFF = 0.945  # of half the lower rate, above which the filter attenuates
_BETA = 9.0  # of Kaiser's window
_NUMBERS = 1 << 20  # source samples multiplied at a time: each is copied for each output sample


class Resampler:
    """Mono samples at `rate` to samples at `wanted`, by a sinc with Kaiser's window (J. O. Smith, "Digital Audio
    Resampling"). There is silence before the first and after the last sample. `reach`: source samples on each side that
    one output sample needs."""

    def __init__(self, rate: int, wanted: int):
        common = math.gcd(rate, wanted)
        self._step, self._phases = rate // common, wanted // common
        self.reach = 0 if rate == wanted else _reach(self._step, self._phases)

    def first_needed(self, start: int) -> int:
        """The first source sample that `block` needs for output sample `start`."""
        return max(start * self._step // self._phases - self.reach, 0)

    def last_needed(self, end: int) -> int:
        """The end of the source samples that it needs for the output before `end`."""
        return (max(end - 1, 0)) * self._step // self._phases + self.reach + 1

    def length(self, count: int) -> int:
        """The number of output samples for this many source samples."""
        return -(-count * self._phases // self._step)

    def block(self, source: Samples, first: int, start: int, end: int) -> Samples:
        """The output samples from `start` up to (not including) `end`. `source`: the source samples from number `first`
        on, which is at most `first_needed`; after them comes silence."""
        if self.reach == 0:
            found = source[start - first : end - first]
            return np.concatenate([found, np.zeros(max(end - start - len(found), 0), np.float32)])
        kernels = _kernels(self._step, self._phases)
        width = kernels.shape[1]
        places = np.arange(start, end, dtype=np.int64) * self._step
        begins = places // self._phases - self.reach - first
        low, high = int(begins.min(initial=0)), int(begins.max(initial=0)) + width
        padded = np.zeros(high - low, dtype=np.float32)
        kept = source[max(low, 0) : min(high, len(source))]
        padded[max(-low, 0) : max(-low, 0) + len(kept)] = kept
        windows = np.lib.stride_tricks.sliding_window_view(padded, width)
        result = np.empty(end - start, dtype=np.float32)
        rows = max(_NUMBERS // width, 1)
        for phase in range(min(self._phases, end - start)):
            # Samples of one phase are multiplied with one kernel.
            kernel = kernels[(start + phase) * self._step % self._phases]
            own, places = result[phase :: self._phases], begins[phase :: self._phases] - low
            for at in range(0, len(own), rows):
                own[at : at + rows] = windows[places[at : at + rows]] @ kernel
        return result


def _reach(step: int, phases: int) -> int:
    return math.ceil(_ZEROS * max(step / phases, 1.0) / _ROLLOFF) + 1


@lru_cache(maxsize=8)
def _kernels(step: int, phases: int) -> Samples:
    """[phases, taps] weights of the source samples for each of `phases` positions between two source samples."""
    reach = _reach(step, phases)
    cutoff = _ROLLOFF * min(phases / step, 1.0)
    offsets = np.arange(-reach, reach + 1)[None] - np.arange(phases)[:, None] / phases
    inside = np.clip(offsets * cutoff / _ZEROS, -1.0, 1.0)
    window = np.i0(_BETA * np.sqrt(1.0 - inside**2)) / np.i0(_BETA)
    window[np.abs(offsets * cutoff) > _ZEROS] = 0.0
    kernels = cutoff * np.sinc(offsets * cutoff) * window
    # A constant stays the same at every position.
    return np.asarray(kernels / kernels.sum(axis=1, keepdims=True), dtype=np.float32)
