"""Tile sizes of attention's kernels: a pure function of head size, formats and the GPU's generation.

Nothing is tuned by trial at serving time: a choice that differs from start to start, or from batch to batch, would
change bits. Shared memory bounds the tiles (163 KiB a block on sm_80, 227 KiB on sm_90 and sm_100, 99 KiB on sm_86,
sm_89 and sm_120), and so do registers: a result of 128 x 128 float32 takes 64 of each thread's 255 with 8 warps. Not
all fits everywhere (`largest_group`).
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_HEAD = 256
_LARGEST_GROUP = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """The settings of a kernel's launch.

    Attributes:
        block_m: pairs of query and head of a tile.
        block_n: keys of a tile.
        block_d: features, with those that pad a head.
        num_warps, num_stages: as Triton means them.
    """

    block_m: int
    block_n: int
    block_d: int
    num_warps: int
    num_stages: int


# Keys of a chunk, the unit in which decoding is split. With 64, an H200 takes 5 to 15% longer for 1 to 48 rows of 1,024
# tokens, since more results are merged; longer contexts and larger batches take the same. Chunks grow with a row's own
# length alone (`max_chunks`): if they grew with the batch, a row's bits would depend on it. A program with several
# chunks reads on from one to the next.
CHUNK = 128
# GPUs whose blocks have the least shared memory: Ampere's and Ada's smaller ones, and from here on Blackwell's.
_SMALL = (86, 89)
_SMALL_BLACKWELL = 120


def max_chunks(kv_heads: int) -> int:
    """Most chunks of a row, beyond which they grow: merging them takes time, and with this many a single row has work
    for twice the multiprocessors of a large GPU."""
    return min(max(256 // kv_heads, 16), 64)


def most_tiles(queries: int, rows: int, most: int, tile: int) -> int:
    """Most tiles of queries that rows of more than `most` queries have, if all rows have so many queries together."""
    shortest = min(rows, queries // (most + 1))  # each of which has a tile that is hardly filled
    return shortest + max(queries - shortest * (most + 1), 0) // tile


def padded(size: int) -> int:
    """The next power of two, at least the 16 that a matrix instruction takes."""
    return max(16, 1 << (size - 1).bit_length())


def largest_group(head_dim: int, in_float32: bool, capability: int) -> int:
    """Most heads that may share keys: 128, or what the compiler fits into the memory of a block.

    Args:
        in_float32: the products are.
        capability: 80, 90, ...
    """
    block_d = padded(head_dim)
    if _has_least_memory(capability):
        if in_float32 and block_d > 64:
            return 16
        return _LARGEST_GROUP if block_d <= 128 else 32
    if in_float32 and block_d > 64:
        most = 128 if block_d <= 128 else 64
        return most if 90 <= capability < 100 else most // 2
    return _LARGEST_GROUP


def _has_least_memory(capability: int) -> bool:
    return capability in _SMALL or capability >= _SMALL_BLACKWELL


def decoders(tiles: Tiles) -> int:
    """Programs of the decode kernel on a multiprocessor, as many as its 65,536 registers hold: with 4 warps a thread
    has 235 to 255, fewer for heads of up to 64 features. No result depends on it."""
    return max((3 if tiles.block_d <= 64 else 2) * 4 // tiles.num_warps, 1)


def decode_tiles(head_dim: int, group: int, product_bytes: int, capability: int, paged: bool) -> Tiles:
    """The tiles of rows with few queries; a tile of keys has about 16 KB, or less if many heads share it.

    Args:
        group: heads that share keys.
        product_bytes: of a number in the products.
        capability: 80, 90, ...
    """
    block_m, block_d = padded(group), padded(head_dim)
    block_n = min(max(16384 // (block_d * product_bytes), 16), 64)
    num_warps = 4
    if block_m >= 64:  # what fewer threads or more keys would spill is counted by tests
        block_n = min(block_n, 32)
        # 64 rows are one warpgroup's on Hopper: the features would be shared out between two, and spill more.
        num_warps = 4 if 90 <= capability < 100 and block_m == 64 and block_d > 64 else 8
    # Two tiles under way: of 5 stages two are the way through the block table.
    return Tiles(block_m, block_n, block_d, num_warps, num_stages=5 if paged else 3)


def prefill_tiles(
    head_dim: int, group: int, product_bytes: int, stored_bytes: int, capability: int, plain: bool, paged: bool
) -> Tiles:
    """The tiles of rows with many queries.

    128 rows of queries are two warpgroups of 64, the height of Hopper's matrix instruction. What is read of keys and
    values is then 1/64 byte for a multiplication in 16 bits: an estimated 790 TFLOP/s would want 6 TB/s, which the
    second cache should give, since the tiles of a row run at the same time.

    Args:
        product_bytes, stored_bytes: of a number in the products and in the pages.
        capability: 80, 90, ...
        plain: there is no window, bias or cap.
    """
    block_d = padded(head_dim)
    small = _has_least_memory(capability)
    if product_bytes == 4:  # three products of tf32 for one, and twice the memory
        if block_d > 128:
            return Tiles(max(32, padded(group)), 16, block_d, num_warps=8, num_stages=1 if small else 2)
        return Tiles(max(64, padded(group)), 32 if block_d <= 64 else 16, block_d, num_warps=8, num_stages=2)
    # Of 3 stages one is the way through the block table, whose entries would be waited for in each tile otherwise.
    # Widening 8 bits takes registers of its own, and so does what happens to scores.
    large, narrow = capability >= 90 and not small, stored_bytes == 1 or not plain
    if block_d <= 64:
        return Tiles(128, 128 if large and not narrow else 64, block_d, num_warps=8, num_stages=3)
    if block_d <= 128:
        block_n = (128 if large else 64) // (2 if narrow else 1)
        return Tiles(128, block_n, block_d, num_warps=8, num_stages=3 if paged or not large else 2)
    block_m = 128 if large and not narrow else max(64, padded(group))
    return Tiles(block_m, 32, block_d, num_warps=8, num_stages=3 if paged else 2)
