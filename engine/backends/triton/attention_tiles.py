"""The common part of the decode and prefill kernels of attention: a tile of queries against a tile of keys.

Each row of a tile is a pair of a query and one of the heads that share keys; columns are keys. Scores and all sums are
float32; the running softmax (arXiv:1805.02867) uses base 2, for which GPUs have an instruction. A running maximum of
-inf means that a query has seen no key yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Kinds of bias, for the kernels' BIAS.
BY_DISTANCE = tl.constexpr(1)
BY_POSITION = tl.constexpr(2)
# Formats of pages, for the kernels' STORED.
PLAIN = tl.constexpr(0)
INT8 = tl.constexpr(1)
FP8 = tl.constexpr(2)


@triton.jit
def widen_fp8(x, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """uint8 [...], the bytes of float8_e4m3fn, exactly in a wider format. Before compute capability 8.9 there is no
    instruction for it. Read as float16, the same bits are 2^-8 of the value, including subnormal ones."""
    if HARDWARE:
        return x.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    bits = x.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    wide = half.to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), wide).to(DTYPE)


@triton.jit
def widen(x, DTYPE: tl.constexpr, STORED: tl.constexpr, HARDWARE: tl.constexpr):
    """Numbers of pages in the format of a product; each 8-bit value is exact in all of these."""
    if STORED == FP8:
        return widen_fp8(x, DTYPE, HARDWARE)
    return x.to(DTYPE)


@triton.jit
def load_vectors(base, places, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[N, BLOCK_D] of vectors that begin at base + places [N]; zeros if not inside [N], and past HEAD_DIM."""
    features = tl.arange(0, BLOCK_D)
    pointers = base + places[:, None] + features[None, :]
    if MASKED:
        return tl.load(pointers, mask=inside[:, None] & (features < HEAD_DIM)[None, :], other=0)
    if HEAD_DIM < BLOCK_D:
        return tl.load(pointers, mask=(features < HEAD_DIM)[None, :], other=0)
    return tl.load(pointers)


@triton.jit
def tanh(x):
    """The hyperbolic tangent by exp, which all targets have; near 0, where exp would lose digits, by its series."""
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(square < 0.0625, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def meet(
    q, shift, query_at, heads, best, total, acc,
    n, low, high, keys, values, key_scales, value_scales, table, first,
    k_page, k_slot, v_page, v_slot, s_page, s_slot,
    bias, columns, zero, left, right, scale, softcap,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    STORED: tl.constexpr, HARDWARE: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and result of a tile of queries after the keys from n to n + BLOCK_N.

    Args:
        q: [M, BLOCK_D] in the format of the products.
        shift: [M] to add to the products (each query's product with the centre of keys), read if SOFTCAP.
        query_at: [M] positions; heads: [M] indices of the heads.
        best, total: [M]; acc: [M, BLOCK_D].
        low, high: keys outside are not read; all keys of a tile are inside unless MASKED.
        keys, values, key_scales, value_scales: pointers to the head that is read.
        table: the row's pages; first: the row's first key if there are no pages.
    """
    key_at = n + tl.arange(0, BLOCK_N)
    inside = (key_at >= low) & (key_at < high)
    if PAGED:
        if MASKED:
            page = tl.load(table + key_at // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(table + key_at // PAGE).to(tl.int64)
        slot = key_at % PAGE
        key_places, value_places = page * k_page + slot * k_slot, page * v_page + slot * v_slot
    else:
        place = (first + key_at).to(tl.int64)
        key_places, value_places = place * k_slot, place * v_slot
    k = widen(load_vectors(keys, key_places, inside, HEAD_DIM, BLOCK_D, MASKED), q.dtype, STORED, HARDWARE)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if STORED != PLAIN:
        # One scale per key, which can multiply the key's scores instead.
        scale_places = page * s_page + slot * s_slot
        if MASKED:
            scores *= tl.load(key_scales + scale_places, mask=inside, other=0).to(tl.float32)[None, :]
        else:
            scores *= tl.load(key_scales + scale_places).to(tl.float32)[None, :]
    if SOFTCAP:
        scores = softcap * tanh((scores + shift[:, None]) * (scale / softcap))
    if BIAS != 0:
        if not SOFTCAP:
            scores *= scale
        if BIAS == BY_DISTANCE:
            column = key_at[None, :] - query_at[:, None] + zero
        else:
            column = key_at[None, :] + tl.zeros_like(query_at)[:, None]
        column = tl.minimum(tl.maximum(column, 0), columns - 1)
        scores = (scores + tl.load(bias + heads[:, None] * columns + column)) * LOG2E
    elif SOFTCAP:
        scores *= LOG2E
    else:
        scores *= scale * LOG2E
    if MASKED:
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (key_at[None, :] <= query_at[:, None])
        if WINDOW:
            distance = key_at[None, :] - query_at[:, None]
            seen = seen & (distance >= -left) & (distance <= right)
        scores = tl.where(seen, scores, float("-inf"))
    peak = tl.maximum(best, tl.max(scores, 1))
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(scores - finite[:, None])
    decay = tl.exp2(best - finite)
    total = total * decay + tl.sum(weights, 1)
    stored = load_vectors(values, value_places, inside, HEAD_DIM, BLOCK_D, MASKED)
    if STORED == PLAIN:
        v = stored.to(q.dtype)
    else:
        if MASKED:
            widths = tl.load(value_scales + scale_places, mask=inside, other=0).to(tl.float32)
        else:
            widths = tl.load(value_scales + scale_places).to(tl.float32)
        if q.dtype == tl.float16:  # its range does not hold every product of a weight and a scale
            v = (widen(stored, tl.float32, STORED, HARDWARE) * widths[:, None]).to(q.dtype)
        else:
            v = widen(stored, q.dtype, STORED, HARDWARE)
            weights *= widths[None, :]
    acc = tl.dot(weights.to(q.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return peak, total, acc


@triton.jit
def merge(best, total, acc, best_of, total_of, acc_of):
    """The running maximum, sum and result [M], [M], [M, D] over two parts of the keys.

    Fused multiplications are explicit, so that the bits are the same wherever this code is used.
    """
    peak = tl.maximum(best, best_of)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    mine, theirs = tl.exp2(best - finite), tl.exp2(best_of - finite)
    total = tl.fma(total, mine, total_of * theirs)
    spread = tl.zeros_like(acc)
    acc = tl.fma(acc, mine[:, None] + spread, acc_of * theirs[:, None])
    return peak, total, acc


@triton.jit
def sink(best, total, acc, scores, lacking, SOFTCAP: tl.constexpr):
    """The running maximum, sum and result after one more score [M] per query without a value; the keys' scores lack
    this much [M], unless they were capped."""
    if not SOFTCAP:
        scores -= lacking
    scores = scores * LOG2E
    peak = tl.maximum(best, scores)
    decay = tl.exp2(best - peak)
    return peak, total * decay + tl.exp2(scores - peak), acc * decay[:, None]


@triton.jit
def divide(acc, total):
    """The results of queries; zeros for queries that saw no key."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]
