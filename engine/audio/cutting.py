"""Divides a long sound into windows that a model reads one by one, cut where it is quiet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.audio.resampling import Samples

_SEARCHED = 6  # the last part of a window in which to look for a quiet place: a sixth
_QUIET = 0.1  # seconds over which loudness is measured


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a sound."""

    start: int  # the index of its first sample in the whole sound
    samples: Samples  # at most as many as the model reads at a time


class Cutter:
    """Cuts a signal, which arrives in pieces of any size, into consecutive windows without gaps.

    Each window but the last ends in the middle of the quietest tenth of a second of its last sixth, so that few words
    are cut. The ends of windows depend only on the sound, not on the pieces.

    Args:
        longest: maximum samples of a window.
        rate: samples per second.
    """

    def __init__(self, longest: int, rate: int):
        self._longest, self._span = longest, max(int(_QUIET * rate), 1)
        self._rest: Samples = np.zeros(0, dtype=np.float32)
        self._start = 0

    def add(self, samples: Samples) -> list[Window]:
        """The windows that these samples complete; the samples follow those given before."""
        self._rest = np.concatenate([self._rest, samples])
        windows = []
        while len(self._rest) > self._longest:
            windows.append(self._take(self._quietest()))
        return windows

    def end(self) -> list[Window]:
        """The last window, if anything is left."""
        return [self._take(len(self._rest))] if len(self._rest) else []

    def _take(self, count: int) -> Window:
        window = Window(self._start, self._rest[:count].copy())
        self._rest, self._start = self._rest[count:], self._start + count
        return window

    def _quietest(self) -> int:
        first = self._longest - self._longest // _SEARCHED
        count = (self._longest - first) // self._span
        if count < 1:
            return self._longest
        parts = self._rest[first : first + count * self._span].astype(np.float64).reshape(count, self._span)
        return first + int((parts**2).sum(axis=1).argmin()) * self._span + self._span // 2
