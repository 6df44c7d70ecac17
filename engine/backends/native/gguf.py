"""GGUF blocks as our own quantised formats, or as numbers."""

from __future__ import annotations

from torch import Tensor

from engine.backends.native.loading import Kernel

_Q4_K = Kernel("gguf_q4_k", "pppi")
_Q6_K = Kernel("gguf_q6_k", "ppi")


def take_q4_k(blocks: Tensor, values: Tensor, lines: Tensor) -> None:
    """Convert blocks of Q4_K to groups of our own 4 bits.

    Args:
        blocks: uint8 [count, 144], one after the other.
        values: int32 [count, 8, 4], contiguous, overwritten.
        lines: float16 [count, 8, 2], contiguous, overwritten: scales and minima.
    """
    _Q4_K.call(blocks.data_ptr(), values.data_ptr(), lines.data_ptr(), len(blocks))


def widen_q6_k(blocks: Tensor, numbers: Tensor) -> None:
    """Expand blocks of Q6_K to numbers.

    Args:
        blocks: uint8 [count, 210], one after the other.
        numbers: float32 [count, 256], contiguous, overwritten.
    """
    _Q6_K.call(blocks.data_ptr(), numbers.data_ptr(), len(blocks))
