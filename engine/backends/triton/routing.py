"""Assigns tokens to experts, in kernels, without reading from the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs that one program of `_place` examines; up to this many are counted there too. Pairs examined at a time: not
# fewer for a small step, which would need a kernel of its own, but masked.
_CHUNK = 4096
_BLOCK = 1024


@triton.jit
def _route(logits, chosen, shares, count, ACTIVE: tl.constexpr, NORMALIZE: tl.constexpr, BINS: tl.constexpr):
    """One token's likeliest experts in the order of their numbers, and the weights of their answers."""
    token = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, BINS)
    real = bins < count
    x = tl.load(logits + token * count + bins, mask=real, other=-float("inf")).to(tl.float32)
    powers = tl.exp(x - tl.max(x, 0))
    shared = powers / tl.sum(powers, 0)
    # Experts are chosen even if the probabilities are NaN, because indices must be within bounds.
    left = tl.where(real, tl.where(shared == shared, shared, 0.0), -2.0)
    for _ in tl.static_range(ACTIVE):
        left = tl.where(bins == tl.argmax(left, 0), -1.0, left)
    taken = left == -1.0
    if NORMALIZE:
        shared = shared / tl.sum(tl.where(taken, shared, 0.0), 0)
    at = token * ACTIVE + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(chosen + at, bins, mask=taken)
    tl.store(shares + at, shared, mask=taken)


@triton.jit
def _found(chosen, begin, pairs, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """The number of pairs from `begin` on that go to each expert."""
    found = tl.zeros((BINS,), tl.int32)
    for start in range(0, tl.minimum(pairs - begin, CHUNK), BLOCK):
        at = begin + start + tl.arange(0, BLOCK)
        real = at < pairs
        found += tl.histogram(tl.load(chosen + at, mask=real, other=0), BINS, mask=real)
    return found


@triton.jit(do_not_specialize=["pairs"])
def _count(chosen, counts, pairs, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """counts [chunks, BINS]: the number of pairs of each chunk that go to each expert."""
    chunk = tl.program_id(0)
    found = _found(chosen, chunk * CHUNK, pairs, CHUNK, BLOCK, BINS)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _place(
    chosen,
    counts,
    order,
    tiles,
    pairs,
    chunks,
    COUNTED: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Record which pairs of a chunk belong to each expert; the first chunk's program also records all tiles.

    order: [pairs], expert by expert. tiles: their number, then (expert, first index in order, pairs) of each.
    """
    expert, chunk = tl.program_id(0), tl.program_id(1)
    bins = tl.arange(0, BINS)
    earlier = tl.zeros((BINS,), tl.int32)
    if COUNTED:
        found = tl.zeros((BINS,), tl.int32)
        for other in range(0, chunks):
            some = tl.load(counts + other * BINS + bins)
            found += some
            earlier += tl.where(other < chunk, some, 0)
    else:
        found = _found(chosen, 0, pairs, CHUNK, BLOCK, BINS)
    first = tl.sum(tl.where(bins < expert, found, 0), 0)
    own = tl.sum(tl.where(bins == expert, found, 0), 0)
    if chunk == 0:
        tile = tl.sum(tl.where(bins < expert, (found + SIZE - 1) // SIZE, 0), 0)
        for start in range(0, own, SIZE):
            entry = tiles + 1 + 3 * (tile + start // SIZE)
            tl.store(entry, expert)
            tl.store(entry + 1, first + start)
            tl.store(entry + 2, tl.minimum(own - start, SIZE))
        if expert == tl.num_programs(0) - 1:
            tl.store(tiles, tile + (own + SIZE - 1) // SIZE)
    place = first + tl.sum(tl.where(bins == expert, earlier, 0), 0)
    for start in range(0, tl.minimum(pairs - chunk * CHUNK, CHUNK), BLOCK):
        at = chunk * CHUNK + start + tl.arange(0, BLOCK)
        mine = (tl.load(chosen + at, mask=at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, at, mask=mine == 1)
        place += tl.sum(mine, 0)


def route(logits: Tensor, active: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Weights (float32) and experts (int32) of each token, [T, active] both, in the order of the experts' numbers.

    Args:
        logits: [T, count]. Of equal logits, the first counts as likelier.
        active: experts per token, at most count.
        normalize: whether a token's weights add up to 1.
    """
    tokens, count = logits.shape
    chosen = logits.new_empty(tokens, active, dtype=torch.int32)
    shares = logits.new_empty(tokens, active, dtype=torch.float32)
    bins = triton.next_power_of_2(count)
    warps = 1 if bins <= 512 else 4  # within one warp no thread waits for another
    _route[(tokens,)](
        logits.contiguous(), chosen, shares, count, ACTIVE=active, NORMALIZE=normalize, BINS=bins, num_warps=warps
    )
    return shares, chosen


def align(chosen: Tensor, count: int, size: int, chunk: int = _CHUNK) -> tuple[Tensor, Tensor]:
    """The pairs sorted by expert (in their own order within an expert), and their division into tiles.

    Args:
        chosen: [T, active] int32, less than count.
        size: maximum pairs per tile.
        chunk: pairs that a program examines; a power of 2.

    Returns:
        order: [T * active] int32.
        tiles: int32: their number, then (expert, first index in order, pairs) of each, with room for `most_tiles`.
    """
    pairs = chosen.numel()
    order = torch.empty_like(chosen.view(-1))
    tiles = chosen.new_empty(1 + 3 * most_tiles(pairs, count, size))
    bins = max(triton.next_power_of_2(count), 32)
    chunks = triton.cdiv(pairs, chunk)
    counted = counted_before(pairs, chunk)
    sizes = {"CHUNK": chunk, "BLOCK": min(chunk, _BLOCK), "BINS": bins}
    counts = chosen
    if counted:
        counts = chosen.new_empty(chunks, bins)
        _count[(chunks,)](chosen, counts, pairs, **sizes)
    _place[(count, chunks)](chosen, counts, order, tiles, pairs, chunks, COUNTED=counted, SIZE=size, **sizes)
    return order, tiles


def counted_before(pairs: int, chunk: int = _CHUNK) -> bool:
    """Whether a separate kernel counts this many pairs before they are placed."""
    return pairs > chunk


def most_tiles(pairs: int, count: int, size: int) -> int:
    """Maximum number of tiles of `size` pairs, because each expert begins a new tile."""
    return (pairs + min(pairs, count) * (size - 1)) // size
