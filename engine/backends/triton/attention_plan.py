"""Which program of attention's kernels does what, worked out on the device once a step and shared by its layers.

Nothing is uploaded, and a captured graph plans anew at each replay from the lengths that it finds. Grids are bounded by
what the host knows; programs share a list of work items, so that none is started for keys that a row does not have: a
graph is made for the longest context there may be, and a program that only finds out that it has nothing to do takes
its time, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

# int32 of an item: row, first chunk, number of chunks, and where the row's partial results begin (-1: there are none).
ITEM = tl.constexpr(4)
_ROWS = tl.constexpr(256)


@triton.jit
def span(
    queries, length, left, right,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """(low, high, size of a chunk, chunks) of a row of few queries: keys [low, high) are seen by some of them.

    Chunks begin at a multiple of BLOCK_N. Their size depends on the row's own length alone, so that the row's result
    does, too: CHUNK keys, or more where there would be more than MAX_CHUNKS of them. There is at least one chunk.
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
def _chunks_of(
    query_start, context, row, rows, left, right,
    MOST: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Chunks of rows; 0 for those that are not there, or have more than MOST queries or none."""
    there = row < rows
    begin = tl.load(query_start + row, mask=there, other=0)
    queries = tl.load(query_start + row + 1, mask=there, other=0) - begin
    length = tl.load(context + row, mask=there, other=0)
    _low, _high, _chunk, chunks = span(queries, length, left, right, CAUSAL, WINDOW, BLOCK_N, CHUNK, MAX_CHUNKS)
    return tl.where((queries > 0) & (queries <= MOST), chunks, 0)


@triton.jit(do_not_specialize=["rows", "left", "right", "workers"])
def plan_decode(
    query_start, context, items, counters, rows, left, right, workers,
    KV_HEADS: tl.constexpr, MOST: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, MAX_CHUNKS: tl.constexpr, RUNS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The work items of one row; a program for each row.

    A row's chunks are cut into runs where there are fewer rows than workers (programs of the decode kernel). How they
    are cut changes no result: chunks are merged in their order, by the same operations, wherever they were computed.

    Args:
        query_start: [rows + 1]; context: [rows].
        items: int32 [1 + bound, ITEM]; items[0, 0] becomes their number.
        counters: int32 [rows, KV_HEADS], which become zeros.
        RUNS, HEADS: powers of two, at least MAX_CHUNKS and KV_HEADS.
    """
    row = tl.program_id(0)
    every = 0
    for start in range(0, rows, _ROWS):
        them = start + tl.arange(0, _ROWS)
        every += tl.sum(
            _chunks_of(query_start, context, them, rows, left, right, MOST, CAUSAL, WINDOW, BLOCK_N, CHUNK, MAX_CHUNKS)
        )
    longest = tl.maximum((every * KV_HEADS + workers - 1) // workers, 1)
    before, parts = 0, 0
    for start in range(0, row, _ROWS):
        them = start + tl.arange(0, _ROWS)
        chunks = _chunks_of(
            query_start, context, them, row, left, right, MOST, CAUSAL, WINDOW, BLOCK_N, CHUNK, MAX_CHUNKS
        )
        before += tl.sum((chunks + longest - 1) // longest)
        parts += tl.sum(tl.where(chunks > longest, chunks, 0))
    chunks = _chunks_of(query_start, context, row, rows, left, right, MOST, CAUSAL, WINDOW, BLOCK_N, CHUNK, MAX_CHUNKS)
    runs = (chunks + longest - 1) // longest
    size = (chunks + tl.maximum(runs, 1) - 1) // tl.maximum(runs, 1)
    run = tl.arange(0, RUNS)
    first = run * size
    # Even runs may be fewer than were counted: what is left over is empty, and does nothing.
    number = tl.maximum(tl.minimum(chunks - first, size), 0)
    item = items + (1 + before + run) * ITEM
    tl.store(item, row + tl.zeros_like(run), mask=run < runs)
    tl.store(item + 1, first, mask=run < runs)
    tl.store(item + 2, number, mask=run < runs)
    tl.store(item + 3, tl.where(chunks > longest, parts, -1) + tl.zeros_like(run), mask=run < runs)
    head = tl.arange(0, HEADS)
    tl.store(counters + row * KV_HEADS + head, tl.zeros_like(head), mask=head < KV_HEADS)
    if row == rows - 1:
        tl.store(items, before + runs)


@triton.jit
def _tiles_of(query_start, row, rows, MOST: tl.constexpr, BLOCK_Q: tl.constexpr):
    there = row < rows
    queries = tl.load(query_start + row + 1, mask=there, other=0) - tl.load(query_start + row, mask=there, other=0)
    return tl.where(queries > MOST, (queries + BLOCK_Q - 1) // BLOCK_Q, 0)


@triton.jit(do_not_specialize=["rows"])
def plan_prefill(query_start, items, rows, MOST: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The tiles of one row of more than MOST queries, as (row, tile), after their number; a program for each row.

    A row's last tile comes first: where attention is causal it takes longest, and what takes long should start early.
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
