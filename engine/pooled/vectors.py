"""Matrices of numbers as JSON and as bytes. `json` would take longer for the numbers of a batch than a GPU takes to
compute them."""

from __future__ import annotations

import base64
from typing import Literal

import msgspec
import numpy as np

from engine.interface.outputs import Matrix

EmbedDtype = Literal["float32", "float16", "bfloat16"]

_DIGITS = 9  # significant digits, which distinguish any two float32
_POWERS = np.array([float(10**power) for power in range(23)])  # powers of ten that float64 holds exactly

_json = msgspec.json.Encoder()


def _numbers(values: Matrix) -> bytes:
    """The JSON list of a vector's numbers, as short as possible so that they read back as the same float32. `values`:
    [features], finite."""
    wide = values.astype(np.float64)
    size = np.abs(wide, out=np.ones_like(wide), where=wide != 0)
    power = _DIGITS - 1 - np.floor(np.log10(size))
    # A whole number divided by an exact power of ten is the float64 nearest to that decimal, and is written as that
    # decimal.
    scale = _POWERS[np.clip(power, 0, len(_POWERS) - 1).astype(np.int64)]
    short = np.where(power < len(_POWERS), np.rint(wide * scale) / scale, wide)
    return _json.encode(short.tolist())


def json_matrix(values: Matrix, *, rows: bool = False) -> bytes:
    """Numbers as JSON, each with just enough digits to distinguish it from any other float32.

    Args:
        values: [rows, features], finite.
        rows: whether to return a list of lists rather than the list of the first row.
    """
    return b"[%b]" % b",".join(map(_numbers, values)) if rows else _numbers(values[0])


def packed(values: Matrix, dtype: EmbedDtype, *, big_endian: bool = False) -> bytes:
    """Numbers in the given number of bits each, row by row.

    bfloat16 is rounded to the nearest value, ties to even. In float16, larger numbers than it can hold become infinite.
    `values`: [rows, features], finite.
    """
    order = ">" if big_endian else "<"
    with np.errstate(over="ignore"):
        match dtype:
            case "float32":
                return values.astype(f"{order}f4").tobytes()
            case "float16":
                return values.astype(f"{order}f2").tobytes()
            case "bfloat16":
                bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
                return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(f"{order}u2").tobytes()


def json_steps(values: Matrix, moved: int = 0) -> bytes:
    """The JSON list of a vector's numbers as whole numbers from -127 to 127, in steps of 1/127 of the largest
    magnitude.

    Args:
        values: [1, features], finite.
        moved: a number to add to each element.
    """
    largest = float(np.abs(values[0]).max())
    return _json.encode((np.rint(values[0] * (127 / (largest or 1.0))).astype(np.int64) + moved).tolist())


def json_signs(values: Matrix, moved: int = 0) -> bytes:
    """The JSON list of bytes that hold the signs of a vector's numbers: eight signs per byte, the first in the highest
    bit, 1 for numbers above 0.

    Args:
        values: [1, features], finite.
        moved: a number to add to each byte.
    """
    return _json.encode((np.packbits(values[0] > 0).astype(np.int64) + moved).tolist())


def json_base64(written: bytes) -> bytes:
    """The JSON string of these bytes in base64."""
    return b'"' + base64.b64encode(written) + b'"'
