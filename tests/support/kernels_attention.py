"""Kernels that show what parts of attention's kernels compute."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.backends.triton.attention_tiles import tanh, widen_fp8


@triton.jit
def widened(x, out, HARDWARE: tl.constexpr):
    """All 256 numbers of fp8 in the format of out."""
    at = tl.arange(0, 256)
    tl.store(out + at, widen_fp8(tl.load(x + at), out.dtype.element_ty, HARDWARE))


@triton.jit
def bent(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tanh(tl.load(x + at)))
