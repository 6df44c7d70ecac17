"""RMSNorm and LayerNorm of rows on a CPU."""

from __future__ import annotations

from torch import Tensor

from engine.backends.native.arguments import empty_like, rows_of, vector_of
from engine.backends.native.loading import kernels

_RMS = kernels("rms_norm", "ppp pp iiiii f i")
_LAYER = kernels("layer_norm", "ppp ppp iiiiii f")
_ROUNDED, _EXACT, _OFFSET = range(3)
_NO_SUM = (None, None)  # the summand and the sum, which only programs have


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, unit_offset: bool = False, in_float32: bool = False
) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension of x [..., size] (arXiv:1910.07467).

    Args:
        x: float32 or bfloat16; rows may have gaps between them.
        weight: [size] in x's format; None for ones.
        unit_offset: multiply by 1 + weight, in float32.
        in_float32: multiply before the norm is rounded to x's format, not after.
    """
    rows, out = rows_of(x), empty_like(x)
    _RMS[x.dtype].call(
        rows.address,
        *_NO_SUM,
        vector_of(weight, rows.size, x.dtype),
        out.data_ptr(),
        *rows[2:],
        eps,
        _OFFSET if unit_offset else _EXACT if in_float32 else _ROUNDED,
    )
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weights: int = 1) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension of x [..., size] (arXiv:1607.06450).

    Args:
        x: float32 or bfloat16; rows may have gaps between them.
        weight, bias: [weights * size] in x's format; None for ones or zeros.
        weights: the number of weight vectors; row i uses vector i % weights.
    """
    rows, out = rows_of(x), empty_like(x)
    _LAYER[x.dtype].call(
        rows.address,
        *_NO_SUM,
        vector_of(weight, weights * rows.size, x.dtype),
        vector_of(bias, weights * rows.size, x.dtype),
        out.data_ptr(),
        *rows[2:],
        weights,
        eps,
    )
    return out
