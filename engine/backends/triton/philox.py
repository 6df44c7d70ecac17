"""The random numbers of `engine.scheduling.philox` on the device: the same words and doubles.

A number depends only on seed, choice index and output position. So a step that is replayed from a CUDA graph needs no
numbers from the host: it advances positions itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32 (Salmon et al., SC 2011).

    Args:
        c0, c1, c2, c3: words of the counter: uint32 of any common shape.
        k0, k1: words of the key: uint32 of that shape.

    Returns:
        Four words: uint32.
    """
    for _ in tl.static_range(10):
        # One multiplication of 32 by 32 bits each: both halves of the product are used.
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def uniform(seed, choice, position):
    """A number in [0, 1) with 53 random bits for each seed (int64), choice index and output position (int32)."""
    words = seed.to(tl.uint64, bitcast=True)
    zero = (words & 0).to(tl.uint32)
    first, second, _third, _fourth = philox4x32(
        position.to(tl.uint32) | zero,
        choice.to(tl.uint32) | zero,
        zero,
        zero,
        words.to(tl.uint32),
        (words >> 32).to(tl.uint32),
    )
    # 27 and 26 bits: both, and their sum, are exact in float64.
    high, low = (first >> 5).to(tl.float64), (second >> 6).to(tl.float64)
    return (high * 67108864.0 + low) * 1.1102230246251565e-16


@triton.jit
def _fill(seeds, choices, positions, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    seed = tl.load(seeds + at, mask=mask, other=0)
    choice = tl.load(choices + at, mask=mask, other=0)
    position = tl.load(positions + at, mask=mask, other=0)
    tl.store(out + at, uniform(seed, choice, position), mask=mask)


def uniforms(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """Numbers [N] float64 for seeds [N] int64, of which all bits count, choices [N] int32 and positions [N] int32."""
    out = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    if len(seeds):
        _fill[(triton.cdiv(len(seeds), _BLOCK),)](seeds, choices, positions, out, len(seeds), BLOCK=_BLOCK)
    return out
