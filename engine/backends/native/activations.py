"""Activations of rows on a CPU, and products of an activation with a second half of the row (arXiv:2002.05202)."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.native.arguments import rows_of, vector_of
from engine.backends.native.loading import kernels

_ACTIVATE = kernels("activate", "ppp iiiii")
# The indices of these names are the numbers in src/activations.cpp.
FUNCTIONS = {
    name: number
    for number, name in enumerate(
        ("relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "exp", "sigmoid", "erf")
    )
}


def activate(x: Tensor, function: str, bias: Tensor | None = None) -> Tensor:
    """function(x + bias) of rows x [T, width], float32 or bfloat16, which may have gaps between them; bias [width]."""
    return _activate(x, function, bias, 0)


def gate(x: Tensor, function: str, bias: Tensor | None = None) -> Tensor:
    """Compute function(a) * b, [T, width], where x + bias, [T, 2 * width], is [a | b]. Raises ValueError if a row has
    an odd width."""
    if x.shape[-1] % 2:
        raise ValueError(f"a gated row must have an even width, got {x.shape[-1]}")
    return _activate(x, function, bias, 1)


def _activate(x: Tensor, function: str, bias: Tensor | None, gated: int) -> Tensor:
    if x.dim() != 2:
        raise ValueError(f"activations need rows [T, width], got {list(x.shape)}")
    rows = rows_of(x)
    width = rows.size >> gated
    out = torch.empty(rows.inner, width, dtype=x.dtype)
    _ACTIVATE[x.dtype].call(
        rows.address,
        vector_of(bias, rows.size, x.dtype),
        out.data_ptr(),
        rows.inner,
        width,
        rows.inner_stride,
        gated,
        FUNCTIONS[function],
    )
    return out
