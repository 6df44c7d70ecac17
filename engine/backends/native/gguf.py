"""GGUF blocks as our own quantised formats, or as numbers."""

from __future__ import annotations

import ctypes

from torch import Tensor

from engine.backends.native.loading import Kernel

_Q4_K = Kernel("gguf_q4_k", "pppi")
_Q4_1 = Kernel("gguf_q4_1", "pppi")
_Q8_0 = Kernel("gguf_q8_0", "pppi")
_Q6_K = Kernel("gguf_q6_k", "ppi")
_INFINITE = Kernel("gguf_infinite_halves", "piiip")


def take_q4_k(blocks: Tensor, values: Tensor, lines: Tensor) -> None:
    """Convert blocks of Q4_K to groups of our own 4 bits.

    Args:
        blocks: uint8 [count, 144], one after the other.
        values: int32 [count, 8, 4], contiguous, overwritten.
        lines: float16 [count, 8, 2], contiguous, overwritten: scales and minima.
    """
    _Q4_K.call(blocks.data_ptr(), values.data_ptr(), lines.data_ptr(), len(blocks))


def take_q4_1(blocks: Tensor, values: Tensor, lines: Tensor) -> None:
    """Convert blocks of Q4_1, uint8 [count, 20], to groups of our own 4 bits: see `take_q4_k`, with one group for each
    block."""
    _Q4_1.call(blocks.data_ptr(), values.data_ptr(), lines.data_ptr(), len(blocks))


def take_q8_0(blocks: Tensor, values: Tensor, scales: Tensor) -> None:
    """Separate the integers of blocks of Q8_0 from their scales.

    Args:
        blocks: uint8 [count, 34], one after the other.
        values: int8 [count, 32], contiguous, overwritten.
        scales: float16 [count], contiguous, overwritten.
    """
    _Q8_0.call(blocks.data_ptr(), values.data_ptr(), scales.data_ptr(), len(blocks))


def count_infinite(blocks: Tensor, place: int) -> int:
    """The number of blocks whose float16 number at a position is infinite or not a number. `blocks`: uint8 [count,
    size], one after the other."""
    found = ctypes.c_int64()
    _INFINITE.call(blocks.data_ptr(), *blocks.shape, place, ctypes.addressof(found))
    return found.value


def widen_q6_k(blocks: Tensor, numbers: Tensor) -> None:
    """Expand blocks of Q6_K to numbers.

    Args:
        blocks: uint8 [count, 210], one after the other.
        numbers: float32 [count, 256], contiguous, overwritten.
    """
    _Q6_K.call(blocks.data_ptr(), numbers.data_ptr(), len(blocks))
