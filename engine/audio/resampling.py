"""Sound at another rate, in blocks: the value of a sample depends on its place alone, not on how the sound was cut."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]

_ZEROS = 16  # of the sinc on each side of its middle
_ROLLOFF = 0.945  # of the lower rate's half, above which the filter lets less and less through
_BETA = 9.0  # of Kaiser's window
_NUMBERS = 1 << 20  # of the source that are multiplied at a time: each is copied once for each sample it helps to make


class Resampler:
    """Mono samples at `rate` to samples at `wanted`, by a sinc with Kaiser's window (J. O. Smith, "Digital Audio
    Resampling"). Before the first sample and after the last one there is silence.

    Attributes:
        reach: samples of the source that one of the result needs on each side.
    """

    def __init__(self, rate: int, wanted: int):
        common = math.gcd(rate, wanted)
        self._step, self._phases = rate // common, wanted // common
        self.reach = 0 if rate == wanted else _reach(self._step, self._phases)

    def first_needed(self, start: int) -> int:
        """The first sample of the source that `block` needs for the sample number `start` of the result."""
        return max(start * self._step // self._phases - self.reach, 0)

    def last_needed(self, end: int) -> int:
        """The end of those that it needs for the samples before number `end`."""
        return (max(end - 1, 0)) * self._step // self._phases + self.reach + 1

    def length(self, count: int) -> int:
        """The number of samples that result from so many samples of the source."""
        return -(-count * self._phases // self._step)

    def block(self, source: Samples, first: int, start: int, end: int) -> Samples:
        """The samples from number `start` up to, without, `end` of the result.

        Args:
            source: the samples of the source from number `first` on, `first_needed` or less; what follows them is
                silence.
        """
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
    """[phases, taps] for each place between two samples of the source, in parts of `phases`, the samples' weights."""
    reach = _reach(step, phases)
    cutoff = _ROLLOFF * min(phases / step, 1.0)
    offsets = np.arange(-reach, reach + 1)[None] - np.arange(phases)[:, None] / phases
    inside = np.clip(offsets * cutoff / _ZEROS, -1.0, 1.0)
    window = np.i0(_BETA * np.sqrt(1.0 - inside**2)) / np.i0(_BETA)
    window[np.abs(offsets * cutoff) > _ZEROS] = 0.0
    kernels = cutoff * np.sinc(offsets * cutoff) * window
    # A constant stays what it is, whatever the place.
    return np.asarray(kernels / kernels.sum(axis=1, keepdims=True), dtype=np.float32)
