"""The formats in which pages hold K and V: those of floating point, and int8 with scales.

A *vector* is one token's K or V of one head. As int8 it is symmetric and has one scale: value = int8 * scale.

Scales are bfloat16. That format has float32's range, so no vector is too large or too small for its scale, and
the 8 bits that it keeps are enough: a vector is quantised with the scale as it was rounded, and a scale rounded
down by at most 1/257 takes the largest value to 127.496, which still rounds to 127. So the error is at most half
a scale, and a dequantised value, the product of 7 and 8 bits, is exact in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
SCALE = torch.bfloat16

_LARGEST = 127
# Far below any scale that matters, and above 0: vectors of zeros need no case of their own.
_SMALLEST_SCALE = 2.0**-126


def vector_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that a vector takes, its scale included."""
    return head_dim * dtype.itemsize + (SCALE.itemsize if dtype == torch.int8 else 0)


def convert(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors in another floating-point format; what that cannot hold becomes NaN.

    An infinite key may give a weight of exactly 0, and then nobody would notice; NaN reaches the output, and
    ends the request.
    """
    if vectors.dtype == dtype:
        return vectors
    converted = vectors.to(dtype)
    return converted.masked_fill_(converted.isinf(), torch.nan)


def quantise(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 [..., head_dim], scales [...]) of vectors [..., head_dim] in any floating-point format.

    abs(dequantise(*quantise(x)) - x) <= scale / 2. A vector that is not finite everywhere comes back as NaN
    everywhere.
    """
    vectors = vectors.float()
    scales = vectors.abs().amax(-1).div_(_LARGEST).clamp_min_(_SMALLEST_SCALE).to(SCALE)
    # Where a vector is not finite, neither is its scale, and 0 times that is NaN.
    steps = vectors.div(scales.float().unsqueeze(-1)).round_().nan_to_num_(0.0)
    return steps.to(torch.int8), scales


def dequantise(steps: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., head_dim] of int8 [..., head_dim] and scales [...]."""
    return steps.float().mul_(scales.float().unsqueeze(-1))
