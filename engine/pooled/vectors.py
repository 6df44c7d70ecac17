"""Vectors as JSON. `json` would take longer for the numbers of a batch than a GPU takes to compute them."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from engine.interface.outputs import Matrix, Pooled

_DIGITS = 9  # significant ones, which tell any two float32 apart
_POWERS = np.array([float(10**power) for power in range(23)])  # of ten, as far as float64 holds them exactly

_json = msgspec.json.Encoder()


def _numbers(values: Matrix) -> bytes:
    """The JSON list of a vector's numbers, short, and such that they are the same float32 when they are read.

    Args:
        values: [features], finite.
    """
    wide = values.astype(np.float64)
    size = np.abs(wide, out=np.ones_like(wide), where=wide != 0)
    power = _DIGITS - 1 - np.floor(np.log10(size))
    # A whole number over an exact power of ten is the float64 nearest to that decimal, and is written as such.
    scale = _POWERS[np.clip(power, 0, len(_POWERS) - 1).astype(np.int64)]
    short = np.where(power < len(_POWERS), np.rint(wide * scale) / scale, wide)
    return _json.encode(short.tolist())


def _base64(values: Matrix) -> bytes:
    """The JSON string of a vector in base64 of little-endian float32."""
    return b'"' + base64.b64encode(values.astype("<f4").tobytes()) + b'"'


def json_vectors(answers: Iterable[Pooled], *, as_base64: bool = False) -> Iterator[bytes]:
    """The vectors in the answers to requests with the task "embed", as JSON: lists of numbers, or base64 of
    little-endian float32.

    Each is made when it is asked for: a thread that goes through thousands lets others run in between.
    """
    write = _base64 if as_base64 else _numbers
    return (write(answer.values()[0]) for answer in answers)
