"""Attention of rows with many queries: large tiles of queries against tiles of keys; compute-bound.

The tiling is that of arXiv:2307.08691: a program keeps one tile of queries and processes the keys that some of them
see. All heads that share keys are folded into the tile, so that a tile of keys is read once for all of them. Masks are
computed only in tiles that need them: at the left end of a window, on the diagonal and at the row's end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.backends.triton.attention_tiles import divide, meet, sink


@triton.jit(do_not_specialize=["table_row", "columns", "zero", "left", "right"])
def prefill(
    q, out, keys, values, key_scales, value_scales, centre, where, query_start, context, items, bias, sinks,
    q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, s_page, s_slot, table_row,
    columns, zero, left, right, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    STORED: tl.constexpr, HARDWARE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, CENTRE: tl.constexpr,
    SINKS: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one key head per program (at least as many programs as tiles, times KV_HEADS). The
    arguments are those of `decode`; items: int32 [1 + tiles, 2] (see `plan_prefill`).

    Keys are divided at positions that are multiples of BLOCK_N, so a query processes the same keys in the same order
    however its prompt was chunked, and gets the same bits.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    item = items + (1 + tl.program_id(0)) * 2
    head = tl.program_id(1)
    there = tl.program_id(0) < tl.load(items)  # a tile that does not exist has neither queries nor keys
    row, tile = tl.load(item, mask=there, other=0), tl.load(item + 1, mask=there, other=0)
    start = tl.load(query_start + row)
    queries = tl.load(query_start + row + 1, mask=there, other=start) - start
    length = tl.load(context + row, mask=there, other=0)
    pair = tl.arange(0, BLOCK_M)
    features = tl.arange(0, BLOCK_D)
    heads = head * GROUP + pair % GROUP
    query = tile * BLOCK_Q + pair // GROUP
    real = (pair < BLOCK_Q * GROUP) & (query < queries)
    origin = 0
    if CAUSAL:
        origin = length - queries
    query_at = origin + query
    token = (start + query).to(tl.int64)
    read = real[:, None] & (features < HEAD_DIM)[None, :]
    x = tl.load(q + token[:, None] * q_token + heads[:, None] * q_head + features[None, :], mask=read, other=0)
    shift = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if CENTRE:
        middle = tl.load(centre + head * HEAD_DIM + features, mask=features < HEAD_DIM, other=0)
        shift = tl.sum(x.to(tl.float32) * middle[None, :], 1)
    x = x.to(DTYPE)

    # Some query sees the keys [low, high); every query sees [all_low, all_high).
    first = origin + tile * BLOCK_Q
    last = tl.minimum(first + BLOCK_Q, origin + queries) - 1
    low, high, all_low, all_high = 0, length, 0, length
    if CAUSAL:
        high, all_high = tl.minimum(high, last + 1), tl.minimum(all_high, first + 1)
    if WINDOW:
        low, all_low = tl.maximum(first - left, 0), tl.maximum(last - left, 0)
        high, all_high = tl.minimum(high, last + right + 1), tl.minimum(all_high, first + right + 1)
    begin = low // BLOCK_N * BLOCK_N
    plain = tl.maximum((all_low + BLOCK_N - 1) // BLOCK_N * BLOCK_N, begin)
    edge = tl.maximum(all_high // BLOCK_N * BLOCK_N, plain)
    if PAGED:
        table, where_from = where + row.to(tl.int64) * table_row, 0
    else:
        table, where_from = where, tl.load(where + row)
    keys += head * k_head
    values += head * v_head
    key_scales += head
    value_scales += head
    best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    if WINDOW:
        for n in tl.range(begin, tl.minimum(plain, high), BLOCK_N):
            best, total, acc = meet(
                x, shift, query_at, heads, best, total, acc, n, low, high,
                keys, values, key_scales, value_scales, table, where_from,
                k_page, k_slot, v_page, v_slot, s_page, s_slot,
                bias, columns, zero, left, right, scale, softcap,
                True, CAUSAL, WINDOW, BIAS, SOFTCAP, STORED, HARDWARE, PAGED, PAGE,
                HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION,
            )  # fmt: skip
    for n in tl.range(plain, edge, BLOCK_N):
        best, total, acc = meet(
            x, shift, query_at, heads, best, total, acc, n, low, high,
            keys, values, key_scales, value_scales, table, where_from,
            k_page, k_slot, v_page, v_slot, s_page, s_slot,
            bias, columns, zero, left, right, scale, softcap,
            False, CAUSAL, WINDOW, BIAS, SOFTCAP, STORED, HARDWARE, PAGED, PAGE,
            HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
    for n in tl.range(edge, high, BLOCK_N):
        best, total, acc = meet(
            x, shift, query_at, heads, best, total, acc, n, low, high,
            keys, values, key_scales, value_scales, table, where_from,
            k_page, k_slot, v_page, v_slot, s_page, s_slot,
            bias, columns, zero, left, right, scale, softcap,
            True, CAUSAL, WINDOW, BIAS, SOFTCAP, STORED, HARDWARE, PAGED, PAGE,
            HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
    if SINKS:
        best, total, acc = sink(best, total, acc, tl.load(sinks + heads), shift * scale, SOFTCAP)
    result = divide(acc, total).to(out.dtype.element_ty)
    tl.store(out + (token[:, None] * HEADS + heads[:, None]) * HEAD_DIM + features[None, :], result, mask=read)
