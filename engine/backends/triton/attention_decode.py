"""Attention of rows with few queries: the decoding kernel, which is memory-bound (see docs/kernels.md).

Up to 16 pairs of query and head are the rows of a product (more if more heads share keys): the minimum that tensor
cores multiply. Single queries leave most rows empty, which should cost little, because the kernel waits for memory. A
tile of 64 keys of 128 features is 32 KB of bfloat16. Each of two programs per multiprocessor has two tiles in flight,
several times the 23 KB that should keep memory busy (an estimated 4.3 TB/s times 0.7 microseconds, over 132
multiprocessors). Beams that read an encoder's pages together fill the empty rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.backends.triton.attention_plan import span
from engine.backends.triton.attention_tiles import divide, meet, merge, sink


@triton.jit
def _part(places, about, one, chunks, part_rows, real, read, HEAD_DIM: tl.constexpr):
    """The maximum, sum and result of a chunk that a program stored; neutral values beyond the last chunk."""
    there = one < chunks
    about += one * part_rows * 2
    best = tl.load(about, mask=real & there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(about + part_rows, mask=real & there, other=0, cache_modifier=".cg")
    acc = tl.load(places + one * part_rows * HEAD_DIM, mask=read & there, other=0, cache_modifier=".cg")
    return best, total, acc


@triton.jit(do_not_specialize=["table_row", "columns", "zero", "left", "right", "part_rows", "most_chunks"])
def decode(
    q, out, keys, values, key_scales, value_scales, centre, where, query_start, context,
    share, firsts, row_of, before, counters, parts, stats, bias, sinks,
    q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, s_page, s_slot, table_row,
    columns, zero, left, right, scale, softcap, part_rows, most_chunks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
    PAGED: tl.constexpr, PAGE: tl.constexpr, STORED: tl.constexpr, HARDWARE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, CENTRE: tl.constexpr,
    SINKS: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute a plan, with as many programs as it has shares.

    Args:
        q: [T, HEADS, HEAD_DIM] with strides (q_token, q_head, 1); out: the same, contiguous.
        keys, values: [pages, PAGE, KV_HEADS, HEAD_DIM], or if not PAGED [tokens, KV_HEADS, HEAD_DIM], with strides
            (k_page, k_slot, k_head, 1) and (v_page, v_slot, v_head, 1); fp8 as uint8.
        key_scales, value_scales: [pages, PAGE, KV_HEADS] with strides (s_page, s_slot, 1).
        centre: float32 [KV_HEADS, HEAD_DIM], read if CENTRE.
        where: block tables with stride table_row, or if not PAGED each row's first token.
        share, firsts, row_of, before, counters: see `plan_decode`.
        parts, stats: float32 [programs, most_chunks, part_rows, HEAD_DIM] and [programs, most_chunks, 2, part_rows].
        bias: float32 [HEADS, columns], read if BIAS; sinks: float32 [HEADS], read if SINKS.
        DTYPE: format of the products.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    pair = tl.arange(0, BLOCK_M)
    features = tl.arange(0, BLOCK_D)
    if EARLY:
        # The previous kernels may have written everything that it reads.
        gdc_launch_dependents()
        gdc_wait()
    size, every = tl.load(share), tl.load(share + 1)
    at = tl.program_id(0) * size
    stop = tl.minimum(at + size, every)
    nth = tl.load(firsts + tl.program_id(0), mask=at < stop, other=0)
    while at < stop:  # one row and one head at a time
        row, begin_of_row = tl.load(row_of + nth), tl.load(before + nth)
        start = tl.load(query_start + row)
        queries = tl.load(query_start + row + 1) - start
        length = tl.load(context + row)
        low, high, chunk, chunks = span(queries, length, left, right, CAUSAL, WINDOW, BLOCK_N, CHUNK, MAX_CHUNKS)
        weight = chunk // CHUNK
        head = (at - begin_of_row) // (chunks * weight)
        begin_of_head = begin_of_row + head * chunks * weight
        # Chunks that begin in this share: none if the share lies within one chunk.
        first = (at - begin_of_head + weight - 1) // weight
        number = tl.minimum((stop - begin_of_head + weight - 1) // weight, chunks) - first
        # Of the chunks that several programs share, no two begin in the same share and extend past its end.
        slot = tl.where(number < chunks, begin_of_head // size, -1)
        at = begin_of_head + chunks * weight
        nth += (head == KV_HEADS - 1).to(tl.int32)
        heads = head * GROUP + pair % GROUP
        query = pair // GROUP
        query_at = query
        if CAUSAL:
            query_at = length - queries + query
        real = query < queries
        token = (start + query).to(tl.int64)
        read = real[:, None] & (features < HEAD_DIM)[None, :]
        x = tl.load(q + token[:, None] * q_token + heads[:, None] * q_head + features[None, :], mask=read, other=0)
        shift = tl.zeros((BLOCK_M,), dtype=tl.float32)
        if CENTRE:
            middle = tl.load(centre + head * HEAD_DIM + features, mask=features < HEAD_DIM, other=0)
            shift = tl.sum(x.to(tl.float32) * middle[None, :], 1)
        x = x.to(DTYPE)
        if PAGED:
            table, origin = where + row.to(tl.int64) * table_row, 0
        else:
            table, origin = where, tl.load(where + row)
        places = parts + (slot.to(tl.int64) * most_chunks + first) * part_rows * HEAD_DIM
        places = places + pair[:, None] * HEAD_DIM + features[None, :]
        about = stats + (slot.to(tl.int64) * most_chunks + first) * 2 * part_rows + pair
        best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        # One loop over the tiles of all chunks, so that tiles of the next chunk are loading while one ends.
        begin = low // BLOCK_N * BLOCK_N + first * chunk
        end = tl.minimum(begin + number * chunk, high)
        best_of, total_of, acc_of = best, total, acc
        for n in tl.range(begin, end, BLOCK_N):
            best_of, total_of, acc_of = meet(
                x, shift, query_at, heads, best_of, total_of, acc_of,
                n, low, high, keys + head * k_head, values + head * v_head,
                key_scales + head, value_scales + head, table, origin,
                k_page, k_slot, v_page, v_slot, s_page, s_slot,
                bias, columns, zero, left, right, scale, softcap,
                True, CAUSAL, WINDOW, BIAS, SOFTCAP, STORED, HARDWARE, PAGED, PAGE,
                HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION,
            )  # fmt: skip
            after = n + BLOCK_N
            if ((after - begin) % chunk == 0) | (after >= end):  # the chunk's last tile
                if slot < 0:
                    best, total, acc = merge(best, total, acc, best_of, total_of, acc_of)
                else:
                    tl.store(places, acc_of, mask=read)
                    tl.store(about, best_of, mask=real)
                    tl.store(about + part_rows, total_of, mask=real)
                    places += part_rows * HEAD_DIM
                    about += 2 * part_rows
                best_of = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
                total_of = tl.zeros((BLOCK_M,), dtype=tl.float32)
                acc_of = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        done = slot < 0
        if slot >= 0:
            # All threads have stored before one of them signals it to the whole device.
            tl.debug_barrier()
            counter = counters + row * KV_HEADS + head
            done = tl.atomic_add(counter, number, sem="acq_rel", scope="gpu") + number == chunks
            if done & (number > 0):
                tl.store(counter, 0)  # for the next layer
                places = parts + slot.to(tl.int64) * most_chunks * part_rows * HEAD_DIM
                places = places + pair[:, None] * HEAD_DIM + features[None, :]
                about = stats + slot.to(tl.int64) * most_chunks * 2 * part_rows + pair
                for one in tl.range(0, chunks, 4):
                    # Four are loaded before the first is needed; chunks that do not exist change nothing.
                    best0, total0, acc0 = _part(places, about, one, chunks, part_rows, real, read, HEAD_DIM)
                    best1, total1, acc1 = _part(places, about, one + 1, chunks, part_rows, real, read, HEAD_DIM)
                    best2, total2, acc2 = _part(places, about, one + 2, chunks, part_rows, real, read, HEAD_DIM)
                    best3, total3, acc3 = _part(places, about, one + 3, chunks, part_rows, real, read, HEAD_DIM)
                    best, total, acc = merge(best, total, acc, best0, total0, acc0)
                    best, total, acc = merge(best, total, acc, best1, total1, acc1)
                    best, total, acc = merge(best, total, acc, best2, total2, acc2)
                    best, total, acc = merge(best, total, acc, best3, total3, acc3)
        if done & (number > 0):
            if SINKS:
                best, total, acc = sink(best, total, acc, tl.load(sinks + heads), shift * scale, SOFTCAP)
            result = divide(acc, total).to(out.dtype.element_ty)
            tl.store(out + (token[:, None] * HEADS + heads[:, None]) * HEAD_DIM + features[None, :], result, mask=read)
