"""Writes keys and values to pages on a GPU: the slot of each token, and the conversion of its vectors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HALVINGS = 20  # for 2^20 rows


@triton.jit
def _peak(x, mask):
    """The largest absolute value of each row, [ROWS, 1], and its number of NaN."""
    size = tl.where(mask & (x == x), tl.abs(x), 0.0)
    return tl.max(size, 1, keep_dims=True), tl.sum((mask & (x != x)).to(tl.int32), 1, keep_dims=True)


@triton.jit
def _float_converted(x, FORMAT: tl.constexpr, PAGES: tl.constexpr):
    """Numbers in the pages' format; values that it cannot represent become NaN."""
    converted = x.to(PAGES)
    if PAGES != FORMAT:
        # Compare in float32: a GPU that cannot compare bfloat16 would have to convert once more.
        back = converted.to(tl.float32)
        converted = tl.where(tl.abs(back) == float("inf"), float("nan"), back).to(PAGES)
    return converted


@triton.jit
def _quantised(x, scale, STEPS: tl.constexpr):
    """Quantised float32 numbers: int8, or the bits of float8_e4m3fn."""
    LIMIT: tl.constexpr = 127.0 if STEPS == 1 else 448.0
    steps = tl.math.div_rn(x, scale)
    steps = tl.where(steps == steps, steps, 0.0)
    steps = tl.minimum(tl.maximum(steps, -LIMIT), LIMIT)
    if STEPS == 1:
        # Beyond 2^23 there are no fractions, so adding this much rounds to the nearest integer, halves to the even one.
        found = ((steps + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        # Explicitly, because GPUs before sm_89 lack this conversion.
        bits = steps.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # the exponent's bias is 7, not 127
        small = ((tl.abs(steps) * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
        found = (tl.where(tl.abs(steps) < 0.015625, small, normal) + ((bits >> 24) & 128)).to(tl.uint8)
    return found


@triton.jit
def store_vectors(
    a, b, rest, first, second, third, paired, single, head, there, slot, pages, scales, centre,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Store the vectors of one token: their tiles a, b and rest, with the features first, second and third."""
    vector = slot * KV_HEADS + head
    place = pages + vector * HEAD_DIM
    if STEPS == 0:
        PAGES: tl.constexpr = pages.dtype.element_ty
        tl.store(place + first, _float_converted(a, FORMAT, PAGES), mask=there & paired)
        tl.store(place + second, _float_converted(b, FORMAT, PAGES), mask=there & paired)
        tl.store(place + third, _float_converted(rest, FORMAT, PAGES), mask=there & single)
    else:
        if centre is not None:
            middle = centre + head * HEAD_DIM
            a -= tl.load(middle + first, mask=there & paired, other=0.0)
            b -= tl.load(middle + second, mask=there & paired, other=0.0)
            rest -= tl.load(middle + third, mask=there & single, other=0.0)
        LIMIT: tl.constexpr = 127.0 if STEPS == 1 else 448.0
        peak_a, bad_a = _peak(a, paired)
        peak_b, bad_b = _peak(b, paired)
        peak_rest, bad_rest = _peak(rest, single)
        peak = tl.maximum(tl.maximum(peak_a, peak_b), peak_rest)
        scale = tl.maximum(tl.math.div_rn(peak, LIMIT), 1.1754943508222875e-38)
        # Explicitly to bfloat16: Triton's interpreter would truncate where GPUs round.
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        scale = tl.where(bad_a + bad_b + bad_rest > 0, float("nan"), scale)
        tl.store(place + first, _quantised(a, scale, STEPS), mask=there & paired)
        tl.store(place + second, _quantised(b, scale, STEPS), mask=there & paired)
        tl.store(place + third, _quantised(rest, scale, STEPS), mask=there & single)
        tl.store(scales + vector, scale.to(tl.bfloat16), mask=there)


@triton.jit(
    do_not_specialize=["tokens", "rows", "table_stride", "table_width"],
    do_not_specialize_on_alignment=["positions", "tables", "query_start"],
)
def slots_kernel(
    out, tables, query_start, positions, tokens, rows, table_stride, table_width,
    PAGE: tl.constexpr, HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The slot of each token; 0 for tokens past the last row or outside its table."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < tokens
    # A token belongs to the last row that does not begin after it; rows without tokens begin where the next row does.
    # A binary search finds the row, with enough iterations for the largest number of rows; further iterations do not
    # change the result.
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + rows
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        begins = tl.load(query_start + middle, mask=there, other=0)
        low = tl.where(begins <= token, middle, low)
        high = tl.where(begins <= token, high, middle)
    real = there & (token < tl.load(query_start + rows))
    position = tl.load(positions + token, mask=real, other=0).to(tl.int64)
    number = position // PAGE
    real &= (position >= 0) & (number < table_width)
    page = tl.load(tables + low.to(tl.int64) * table_stride + number, mask=real, other=0).to(tl.int64)
    tl.store(out + token, tl.where(real, page * PAGE + position % PAGE, 0), mask=there)


def slots_of(tables: Tensor, query_start: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """[T] int64 block * page_size + offset of each of T tokens at positions [T].

    Args:
        tables: [R, max blocks] int32.
        query_start: [R + 1] int32 first token of each row. Tokens past the last row, and tokens whose positions are
            outside their tables, have slot 0.
    """
    tokens, rows = positions.shape[0], tables.shape[0]
    out = torch.empty(tokens, dtype=torch.int64, device=positions.device)
    if not tokens or not rows or not tables.shape[1]:
        return out.zero_()
    slots_kernel[(triton.cdiv(tokens, 128),)](
        out,
        tables,
        query_start,
        positions.contiguous(),
        tokens,
        rows,
        tables.stride(0),
        tables.shape[1],
        PAGE=page_size,
        HALVINGS=_HALVINGS,
        BLOCK=128,
    )
    return out
