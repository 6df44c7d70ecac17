"""Divides attention's work among programs, on the device, once per step for all layers (see docs/kernels.md).

Nothing is uploaded, and a captured graph plans again at each replay from the current lengths. Limits known on the host
bound the grids: a graph is made for the longest possible context, and a program without work still takes time.

A program pays for each row and head that it begins: an estimated 2 microseconds of waiting for addresses, as long as 64
keys of 128 features take. Work that is spread over several programs costs writing and merging: an eighth of a split
row's bytes. So if all rows are alike, shares are whole heads, provided that this makes them longer by no more than an
eighth.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ROWS = tl.constexpr(256)


@triton.jit
def span(
    queries, length, left, right,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """(low, high, size of a chunk, chunks) of a row with few queries: its queries see the keys [low, high).

    Chunks begin at a multiple of BLOCK_N. Their size depends only on the row's own length, so that the row's result
    does too: CHUNK keys, or a multiple if there would be more than MAX_CHUNKS of them. There is at least one chunk.
    """
    low, high = length * 0, length
    if WINDOW:
        first = low
        if CAUSAL:
            first = length - queries
        low = tl.maximum(first - left, 0)
        high = tl.minimum(high, first + queries + right)
    keys = tl.maximum(high - low // BLOCK_N * BLOCK_N, 1)
    chunk = (keys + MAX_CHUNKS * CHUNK - 1) // (MAX_CHUNKS * CHUNK) * CHUNK
    return low, high, chunk, (keys + chunk - 1) // chunk


@triton.jit
def _work_of(
    query_start, context, row, rows, left, right,
    MOST: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Work per head of rows, in units of CHUNK keys; 0 for no row, or for a row with no or more than MOST queries."""
    there = row < rows
    begin = tl.load(query_start + row, mask=there, other=0)
    queries = tl.load(query_start + row + 1, mask=there, other=0) - begin
    length = tl.load(context + row, mask=there, other=0)
    _low, _high, chunk, chunks = span(queries, length, left, right, CAUSAL, WINDOW, BLOCK_N, CHUNK, MAX_CHUNKS)
    return tl.where((queries > 0) & (queries <= MOST), chunks * (chunk // CHUNK), 0)


@triton.jit(do_not_specialize=["rows", "left", "right", "workers"])
def plan_decode(
    query_start, context, share, firsts, row_of, before, counters, rows, left, right, workers,
    KV_HEADS: tl.constexpr, MOST: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Divide the work of all rows with few queries, in units of CHUNK keys, into equal shares; one program per row.

    The order is by row, then by head, then by chunk. A chunk belongs to the share in which it begins. The division does
    not change results: chunks are merged in order, by the same operations, wherever they were computed.

    Args:
        query_start: [rows + 1]; context: [rows].
        share: int32 [2], gets the work of a program, and the work of all rows.
        firsts: int32 [workers], gets the row in which each program begins, as an index of the rows with few queries;
            not filled for programs without work.
        row_of, before: int32 [rows], get the rows with few queries, and the work of all rows before each of them.
        counters: int32 [rows, KV_HEADS], set to zero.
        workers: number of programs of the decode kernel.
        HEADS: a power of two, at least KV_HEADS.
    """
    row = tl.program_id(0)
    every, earlier, number, many, longest = 0, 0, 0, 0, 1
    for start in range(0, rows, _ROWS):
        them = start + tl.arange(0, _ROWS)
        work = _work_of(query_start, context, them, rows, left, right, MOST, CAUSAL, WINDOW, BLOCK_N, CHUNK, MAX_CHUNKS)
        every += tl.sum(work)
        earlier += tl.sum(tl.where(them < row, work, 0))
        number += tl.sum(((them < row) & (work > 0)).to(tl.int32))
        many += tl.sum((work > 0).to(tl.int32))
        longest = tl.maximum(longest, tl.max(work, 0))
    alike = every == many * longest
    every, earlier = every * KV_HEADS, earlier * KV_HEADS
    size = tl.maximum((every + workers - 1) // workers, 1)
    whole = (size + longest - 1) // longest * longest
    size = tl.where(alike & (8 * (whole - size) <= size), whole, size)
    own = _work_of(query_start, context, row, rows, left, right, MOST, CAUSAL, WINDOW, BLOCK_N, CHUNK, MAX_CHUNKS)
    if own > 0:
        tl.store(row_of + number, row)
        tl.store(before + number, earlier)
        stop = (earlier + own * KV_HEADS + size - 1) // size
        for start in range((earlier + size - 1) // size, stop, _ROWS):
            program = start + tl.arange(0, _ROWS)
            tl.store(firsts + program, number + tl.zeros_like(program), mask=program < stop)
    head = tl.arange(0, HEADS)
    tl.store(counters + row * KV_HEADS + head, tl.zeros_like(head), mask=head < KV_HEADS)
    if row == rows - 1:
        tl.store(share, size)
        tl.store(share + 1, every)


@triton.jit
def _tiles_of(query_start, row, rows, MOST: tl.constexpr, BLOCK_Q: tl.constexpr):
    there = row < rows
    queries = tl.load(query_start + row + 1, mask=there, other=0) - tl.load(query_start + row, mask=there, other=0)
    return tl.where(queries > MOST, (queries + BLOCK_Q - 1) // BLOCK_Q, 0)


@triton.jit(do_not_specialize=["rows"])
def plan_prefill(query_start, items, rows, MOST: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The tiles of one row with more than MOST queries, as (row, tile), after their number; one program per row.

    A row's last tile comes first: with causal attention it takes longest, and long work should start early.
    """
    row = tl.program_id(0)
    before = 0
    for start in range(0, row, _ROWS):
        before += tl.sum(_tiles_of(query_start, start + tl.arange(0, _ROWS), row, MOST, BLOCK_Q))
    tiles = _tiles_of(query_start, row, rows, MOST, BLOCK_Q)
    for start in range(0, tiles, _ROWS):
        tile = start + tl.arange(0, _ROWS)
        item = items + (1 + before + tile) * 2
        tl.store(item, row + tl.zeros_like(tile), mask=tile < tiles)
        tl.store(item + 1, tiles - 1 - tile, mask=tile < tiles)
    if row == rows - 1:
        tl.store(items, before + tiles)
