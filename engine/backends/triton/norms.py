"""RMSNorm and LayerNorm on a GPU, alone or with the additions to the residual stream around them.

Little is computed here; the time is that of reading and writing. Separately, an addition and the norm after it move
five rows (read two, write the sum, read it, write the norm); fused, four. A step that decodes few tokens pays for
launches, of which there is one instead of two, or of three if a sublayer's result has its own norm.

A row is read once and kept in registers (up to `WIDEST` features), so that mean and variance are computed from the
numbers themselves. A thread processes eight features, which is one load of 16 bytes in a 16-bit format, and up to 32
for long rows; a row of 4096 has 16 warps. Arithmetic is in float32, and results are rounded at the same points as in
the modules of `engine.model.norms`. The division of a row among threads depends only on its width, so its bits do not
depend on the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 32768
_NOTHING, _ROUNDED, _EXACT, _OFFSET, _LAYER = range(5)


class Norm(NamedTuple):
    """A norm over the last dimension."""

    weight: Tensor | None  # [size], None for ones
    eps: float  # added to the mean square, or to the variance
    centred: bool = False  # LayerNorm (arXiv:1607.06450) instead of RMSNorm (arXiv:1910.07467)
    bias: Tensor | None = None  # [size] bias of a LayerNorm, None for zeros
    unit_offset: bool = False  # whether an RMSNorm multiplies by 1 + weight, in float32
    in_float32: bool = False  # whether an RMSNorm multiplies before it rounds to its input's format, not after


@triton.jit
def features_of(weight, at, mask, OFFSET: tl.constexpr):
    """A weight's or a bias's features as float32, plus OFFSET; None for None."""
    found = None
    if weight is not None:
        found = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32) + OFFSET
    return found


@triton.jit
def scaled(x, scale, factor, shift, KIND: tl.constexpr, FORMAT: tl.constexpr):
    """x * scale * factor + shift of a norm, rounded at the points of its kind, as float32 numbers that the format can
    represent.

    Args:
        x: [ROWS, BLOCK] float32, minus their mean for a LayerNorm; scale [ROWS, 1].
        factor, shift: [1, BLOCK] float32, None for none.
    """
    x = x * scale
    if KIND == 1:
        x = x.to(FORMAT).to(tl.float32)
    if factor is not None:
        x = x * factor
    if shift is not None:
        x += shift
    return x.to(FORMAT).to(tl.float32)


@triton.jit
def normalised(x, mask, factor, shift, eps, SIZE: tl.constexpr, KIND: tl.constexpr, FORMAT: tl.constexpr):
    """The norm of rows x, zeros if `mask` [1, BLOCK] is false; otherwise as in `scaled`."""
    if KIND == 4:
        x = tl.where(mask, x - tl.sum(x, 1, keep_dims=True) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / SIZE + eps)
    return scaled(x, scale, factor, shift, KIND, FORMAT)


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x, out, y, z, after_weight, after_bias, weight, bias,
    rows, x_outer, x_inner, out_outer, out_inner, after_eps, eps,
    INNER: tl.constexpr, SIZE: tl.constexpr, AFTER: tl.constexpr, KIND: tl.constexpr, STORE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = norm(x + after(y) + z), where y, z, both norms and out may be absent.

    Row r of x begins at (r // INNER) * x_outer + (r % INNER) * x_inner, and likewise for out; rows of y and z are
    contiguous. STORE: the sum is also stored, in place of x.
    """
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    feature = tl.arange(0, BLOCK)[None, :]
    inside = feature < SIZE
    mask = (row < rows) & inside
    FORMAT: tl.constexpr = x.dtype.element_ty
    source = x + (row // INNER) * x_outer + (row % INNER) * x_inner + feature
    # Everything is loaded before anything is waited for.
    total = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    if y is not None:
        added = tl.load(y + row * SIZE + feature, mask=mask, other=0.0).to(tl.float32)
    if z is not None:
        also = tl.load(z + row * SIZE + feature, mask=mask, other=0.0).to(tl.float32)
    after_factor = features_of(after_weight, feature, inside, 1.0 if AFTER == 3 else 0.0)
    after_shift = features_of(after_bias, feature, inside, 0.0)
    factor = features_of(weight, feature, inside, 1.0 if KIND == 3 else 0.0)
    shift = features_of(bias, feature, inside, 0.0)
    if y is not None:
        if AFTER > 0:
            added = normalised(added, inside, after_factor, after_shift, after_eps, SIZE, AFTER, FORMAT)
        total = (total + added).to(FORMAT).to(tl.float32)
    if z is not None:
        total = (total + also).to(FORMAT).to(tl.float32)
    if STORE:
        tl.store(source, total.to(FORMAT), mask=mask)
    if KIND > 0:
        total = normalised(total, inside, factor, shift, eps, SIZE, KIND, FORMAT)
        place = out + (row // INNER) * out_outer + (row % INNER) * out_inner + feature
        tl.store(place, total.to(FORMAT), mask=mask)


def serves(x: Tensor) -> bool:
    """Whether `norm` supports x."""
    return x.dim() <= 3 and 0 < x.shape[-1] <= WIDEST and x.stride(-1) == 1


def norm(x: Tensor, how: Norm, out: Tensor | None = None) -> Tensor:
    """The norm of x [..., size], with up to two dimensions before the last; rows may have gaps between them. Raises
    ValueError if x has more dimensions, or more than `WIDEST` features.

    Args:
        x: float32, bfloat16 or float16.
        out: memory for the result, whose rows may have gaps; may be x itself. None: new memory.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch(x, out, None, None, None, how, False)
    return out


def add_norm(
    stream: Tensor,
    y: Tensor,
    how: Norm | None,
    *,
    after: Norm | None = None,
    also: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """Add after(y) to a residual stream in place, and return the norm of the sum. Raises ValueError if shapes, formats
    or devices do not match, or there are more than `WIDEST` features.

    Args:
        stream: [T, size], contiguous.
        y: the addend; `after` is its own norm.
        how: None for no norm: the result is the stream.
        also: a second addend.
        in_place: whether the norm replaces the sum in the stream.
    """
    for part in (stream, y, also):
        if part is not None and (part.shape != stream.shape or part.dtype != stream.dtype or not part.is_contiguous()):
            raise ValueError(f"{list(part.shape)} of {part.dtype} is not added to {list(stream.shape)} side by side")
    out = stream if how is None or in_place else torch.empty_like(stream)
    _launch(stream, out, y, also, after, how, how is None or not in_place)
    return out


def _launch(
    x: Tensor, out: Tensor, y: Tensor | None, z: Tensor | None, after: Norm | None, how: Norm | None, store: bool
) -> None:
    size = x.shape[-1]
    if not serves(x) or not serves(out):
        raise ValueError(f"norms are of [rows, rows, up to {WIDEST}] with contiguous features, got {list(x.shape)}")
    rows = x.numel() // size
    if not rows:
        return
    inner = x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(size)
    together = max(1, 1024 // block)  # rows per program, which does not depend on the number of rows
    none = Norm(None, 0.0)
    first, last = after or none, how or none
    norm_kernel[(triton.cdiv(rows, together),)](
        x,
        out,
        y,
        z,
        first.weight,
        first.bias,
        last.weight,
        last.bias,
        rows,
        *_strides(x),
        *_strides(out),
        first.eps,
        last.eps,
        INNER=inner,
        SIZE=size,
        AFTER=kind(after),
        KIND=kind(how),
        STORE=store,
        ROWS=together,
        BLOCK=block,
        num_warps=max(1, min(16 if block <= 8192 else 32, together * block // 256)),
    )


def _strides(x: Tensor) -> tuple[int, int]:
    strides = x.stride()[:-1]
    return (strides[0] if strides else 0, strides[1] if len(strides) > 1 else 0)


def kind(how: Norm | None) -> int:
    if how is None:
        return _NOTHING
    if how.centred:
        return _LAYER
    return _OFFSET if how.unit_offset else _EXACT if how.in_float32 else _ROUNDED
