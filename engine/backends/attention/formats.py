"""The formats of K and V in pages: floating-point formats, and int8 and fp8 with scales.

A *vector* is one token's K or V of one head. In 8 bits it is symmetric and has one scale: value = step * scale.

Scales are bfloat16. bfloat16 has float32's range, so no vector is too large or too small for its scale. Its 8
significant bits are enough: a vector is quantised with the rounded scale, and a scale rounded down by at most 1/257
takes the largest value of int8 to 127.496, which still rounds to 127. So the error is at most half a scale, and a
dequantised value, a product of 7 and 8 bits, is exact in float32.

fp8 is float8_e4m3fn: 3 bits after the leading one, steps of 2^-9 below 2^-6, a maximum of 448, no infinity. The same
scale takes the largest value to 449.75, which rounds to 448. So the error of a value x is at most max(abs(x) / 16,
scale / 1024): less than int8's if abs(x) < 8 * scale, a 56th of the largest value, and more above. A dequantised value,
the product of 4 and 8 bits, is exact in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
# The largest step of each format with scales.
LARGEST = {torch.int8: 127.0, FP8: 448.0}
FORMATS = (torch.float32, torch.bfloat16, torch.float16, *LARGEST)
SCALE = torch.bfloat16

# Far below any relevant scale and above 0, so vectors of zeros need no special case.
_SMALLEST_SCALE = 2.0**-126


class PageShape(NamedTuple):
    """The content of a layer's pages per token: `vectors` of `head_dim` features for each of its KV heads. Two vectors
    are a key and a value; one is both."""

    kv_heads: int
    head_dim: int
    vectors: int = 2


def vector_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a vector, including its scale."""
    return head_dim * dtype.itemsize + (SCALE.itemsize if dtype in LARGEST else 0)


def format_name(dtype: torch.dtype) -> str:
    """The name of a format in `EngineConfig.kv_cache_dtype`."""
    return "fp8" if dtype == FP8 else str(dtype).removeprefix("torch.")


def format_named(name: str) -> torch.dtype:
    found: torch.dtype = FP8 if name == "fp8" else getattr(torch, name)
    return found


def movable(pages: Tensor) -> Tensor:
    """Pages in a form that torch can copy and index: fp8, which few operators support, as uint8 with the same bytes."""
    return pages.view(torch.uint8) if pages.dtype == FP8 else pages


def convert(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors in another floating-point format; values that it cannot represent become NaN.

    An infinite key could give a weight of exactly 0, which would hide the overflow; NaN reaches the output and ends the
    request.
    """
    if vectors.dtype == dtype:
        return vectors
    converted = vectors.to(dtype)
    return converted.masked_fill_(converted.isinf(), torch.nan)


def quantise(vectors: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """(int8 or fp8 [..., head_dim], scales [...]) of vectors [..., head_dim] in any floating-point format.

    abs(dequantise(*quantise(x)) - x) is at most scale / 2 for int8, max(abs(x) / 16, scale / 1024) for fp8. A vector
    that is not finite everywhere is read back as NaN everywhere.
    """
    vectors, largest = vectors.float(), LARGEST[dtype]
    scales = vectors.abs().amax(-1).div_(largest).clamp_min_(_SMALLEST_SCALE).to(SCALE)
    # If a vector is not finite, neither is its scale, and 0 times such a scale is NaN.
    steps = vectors.div(scales.float().unsqueeze(-1)).nan_to_num_(0.0)
    if dtype == torch.int8:
        steps.round_()
    # Without a limit, the conversion of 449.75 to fp8 depends on torch's version and the device.
    return steps.clamp_(-largest, largest).to(dtype), scales


def dequantise(steps: Tensor, scales: Tensor) -> Tensor:
    """float32 [..., head_dim] of int8 or fp8 [..., head_dim] and scales [...]."""
    return steps.float().mul_(scales.float().unsqueeze(-1))
