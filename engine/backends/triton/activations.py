"""Activations of rows on a GPU, and products of an activation with a second half of the row (arXiv:2002.05202).

The activation is computed in float32 and rounded to the format of its input before it is multiplied with the second
half. This equals torch's functions in sequence, in one pass over the memory instead of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FUNCTIONS = ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh")
# One of 128 threads processes eight numbers: one load of 16 bytes in a 16-bit format.
_BLOCK, _WARPS = 1024, 4


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """tanh of float32 numbers, to about 4 units in the last place: by the exponential, and near 0 by the series."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    power = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.2, series, tl.where(x < 0, -far, far))


@triton.jit
def activated(x, FUNCTION: tl.constexpr):
    """An activation of float32 numbers."""
    if FUNCTION == "relu":
        x = tl.where(x < 0, 0.0, x)  # NaN stays
    elif FUNCTION == "relu2":
        x = tl.where(x < 0, 0.0, x * x)
    elif FUNCTION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        # 0.5 * (1 + tanh(u)) is sigmoid(2u).
        x = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif FUNCTION == "quick_gelu":
        x = x * sigmoid(1.702 * x)
    elif FUNCTION == "silu":
        x = x / (1.0 + tl.exp(-x))
    else:
        tl.static_assert(FUNCTION == "tanh")
        x = tanh(x)
    return x


@triton.jit
def activate_kernel(
    x, out, x_stride, WIDTH: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (r, c): BLOCK numbers of row r of out [T, WIDTH]; rows of x are x_stride apart."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    source = x + row * x_stride + at
    FORMAT: tl.constexpr = x.dtype.element_ty
    result = activated(tl.load(source, mask=mask, other=0.0).to(tl.float32), FUNCTION).to(FORMAT)
    if GATED:
        second = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) * second).to(FORMAT)
    tl.store(out + row * WIDTH + at, result, mask=mask)


def activate(x: Tensor, function: str) -> Tensor:
    """function(x) of rows x [T, width], which may have gaps between them. Raises ValueError if the function does not
    exist, or x does not consist of rows."""
    return _launch(x, function, False)


def gate(x: Tensor, function: str) -> Tensor:
    """function(a) * b of rows x = [a | b] of [T, 2 * width] to [T, width]. Raises ValueError if the function does not
    exist, or a row has an odd width."""
    return _launch(x, function, True)


def _launch(x: Tensor, function: str, gated: bool) -> Tensor:
    if function not in FUNCTIONS:
        raise ValueError(f"there is no activation {function!r}, only {', '.join(FUNCTIONS)}")
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"activations need rows [T, width] with contiguous features, got {list(x.shape)}")
    rows, width = x.shape
    if gated and width % 2:
        raise ValueError(f"a gated row must have an even width, got {width}")
    width >>= gated
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows and width:
        activate_kernel[(rows, triton.cdiv(width, _BLOCK))](
            x, out, x.stride(0), WIDTH=width, FUNCTION=function, GATED=gated, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return out
