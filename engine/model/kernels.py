"""Decides where our own kernels replace torch: on a CPU (`engine.backends.native`) where they are faster, on a GPU
(`engine.backends.triton`) for all functions here.

The code for a row depends only on its format, never on the number of rows, because a row's bits would otherwise depend
on the batch. Without a library, and for everything not listed here, torch computes the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.backends import native
from engine.backends import triton as gpu
from engine.backends.attention.base import Paged
from engine.backends.native import activations, norms, rotary
from engine.backends.native.gemm import Quantised
from engine.model import spec
from engine.model.positions import Rotary

_FORMATS = (torch.float32, torch.bfloat16)
GPU_FORMATS = (torch.float32, torch.bfloat16, torch.float16)
_NARROW = (torch.bfloat16, torch.float16)

# For each format, the activations that are faster here, alone and times the second half of a row.
PLAIN: dict[torch.dtype, frozenset[spec.Activation]] = {
    torch.float32: frozenset({"gelu_tanh", "quick_gelu", "relu2"}),
    torch.bfloat16: frozenset({"gelu_tanh", "quick_gelu", "relu2"}),
}
GATED: dict[torch.dtype, frozenset[spec.Activation]] = {
    torch.float32: frozenset({"silu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh"}),
    torch.bfloat16: frozenset({"silu", "gelu_tanh", "quick_gelu", "relu", "relu2", "tanh"}),
}


class RowForm(NamedTuple):
    """The way in which a GPU computes a single row; an argument of each pass."""

    name: str
    fused: bool = False  # whether to use our kernels around products (`engine.model.executors.triton_row`)
    overlapping: bool = False  # whether these begin before the previous ones end


LIBRARY = RowForm("the library's products")
FUSED = RowForm("fused products", fused=True)
OVERLAPPING = RowForm("overlapping fused products", fused=True, overlapping=True)


def take(x: Tensor) -> bool:
    """Whether there are kernels for tensors like x on a CPU."""
    return x.is_cpu and x.dtype in _FORMATS and native.available()


def take_on_gpu(x: Tensor) -> bool:
    """Whether there are kernels for tensors like x on their device, with contiguous features."""
    return gpu.serves(x.device) and x.dtype in GPU_FORMATS and x.stride(-1) == 1


def activate(name: spec.Activation, x: Tensor) -> Tensor | None:
    """name(x) of rows x [T, width]; None if torch should compute it."""
    if take_on_gpu(x):
        from engine.backends.triton import activations as on_gpu

        return on_gpu.activate(x, name)
    if not take(x) or name not in PLAIN[x.dtype]:
        return None
    return activations.activate(x, name)


def gate(name: spec.Activation, x: Tensor) -> Tensor | None:
    """name(a) * b of rows [a | b] of x [T, 2 * width]; None if torch should compute it."""
    if take_on_gpu(x):
        from engine.backends.triton import activations as on_gpu

        return on_gpu.gate(x, name)
    if not take(x) or name not in GATED[x.dtype]:
        return None
    return activations.gate(x, name)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, unit_offset: bool, in_float32: bool) -> Tensor | None:
    """RMSNorm of the last dimension; None if torch should compute it."""
    if weight is not None and weight.dtype != x.dtype:
        return None
    if take_on_gpu(x):
        from engine.backends.triton import norms as on_gpu

        how = on_gpu.Norm(weight, eps, unit_offset=unit_offset, in_float32=in_float32)
        return on_gpu.norm(x, how) if on_gpu.serves(x) else None
    if not take(x):
        return None
    return norms.rms_norm(x, weight, eps, unit_offset=unit_offset, in_float32=in_float32)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rows: int = 1) -> Tensor | None:
    """LayerNorm of the last dimension, with separate weights for `rows` rows; None if torch should compute it."""
    if any(part is not None and part.dtype != x.dtype for part in (weight, bias)):
        return None
    if take_on_gpu(x):
        from engine.backends.triton import norms as on_gpu

        served = rows == 1 and on_gpu.serves(x)
        return on_gpu.norm(x, on_gpu.Norm(weight, eps, centred=True, bias=bias)) if served else None
    if not take(x):
        return None
    return norms.layer_norm(x, weight, bias, eps, rows)


def wide_product(x: Tensor, weight: Tensor | Quantised, bias: Tensor | None, form: RowForm) -> Tensor | None:
    """x @ weight.T + bias of rows [N, features] in float32, not rounded to x's format first; None if torch has no such
    product."""
    if form.fused and take_on_gpu(x) and x.shape[0] == 1:
        from engine.backends.triton import matvec

        if matvec.serves(weight):
            return matvec.product(x, weight, bias, dtype=torch.float32, overlap=form.overlapping)
    if isinstance(weight, Quantised):
        if not take_on_gpu(x):
            return None
        from engine.backends.triton import few_bits

        return few_bits.product(x, weight, bias, dtype=torch.float32)
    if not x.is_cuda or torch.version.hip is not None or x.dtype not in _NARROW or weight.dtype != x.dtype:
        return None
    product = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return product if bias is None else product.add_(bias)


def rotate_and_store(
    turning: Tensor,
    values: Tensor,
    part: Rotary | None,
    angles: tuple[Tensor, Tensor] | None,
    cache: Paged | None,
    slots: Tensor | None,
) -> bool:
    """Rotate heads in place, and store keys and values in pages; returns False, without any change, if torch should do
    it.

    Args:
        turning: [T, heads + kv_heads, head_dim], queries first; it is overwritten.
        angles: cosines and sines of the tokens, for `part`.
        cache: None for keys without pages, which are rotated in place too.
        slots: the slots of the first tokens.
    """
    if take_on_gpu(turning):
        return _on_gpu(turning, values, part, angles, cache, slots)
    if not take(turning) or turning.shape[2] > rotary.LONGEST_HEAD:
        return False
    if cache is not None and cache.keys.dtype not in rotary.PAGES:
        return False
    rotation = None
    if part is not None and angles is not None:
        rotation = rotary.Rotation(*angles, part.interleaved)
    if cache is not None and slots is not None:
        rotary.rotate_and_store(turning, values, rotation, cache, slots)
    elif rotation is not None:
        rotary.rotate_(turning, rotation)
    return True


def _on_gpu(
    turning: Tensor,
    values: Tensor,
    part: Rotary | None,
    angles: tuple[Tensor, Tensor] | None,
    cache: Paged | None,
    slots: Tensor | None,
) -> bool:
    from engine.backends.triton import rotary as on_gpu

    if turning.shape[2] > on_gpu.LONGEST_HEAD:
        return False
    how = None
    if part is not None and angles is not None:
        how = on_gpu.Angles(*angles, part.interleaved, part.in_float32)
    if cache is not None and slots is not None:
        on_gpu.rotate_and_store(turning, values, cache, angles=how, slots=slots)
    elif how is not None:
        on_gpu.rotate_(turning, how)
    return True
