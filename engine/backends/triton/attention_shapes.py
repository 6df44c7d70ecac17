"""Tile sizes of attention's kernels: a pure function of head size, formats and the GPU's generation.

Nothing is tuned by trial at serving time, because a choice that differs between starts or batches would change bits.
Shared memory limits the tiles (163 KiB per block on sm_80, 227 KiB on sm_90 and sm_100, 99 KiB on sm_86, sm_89 and
sm_120), and so do registers: a result of 128 x 128 float32 takes 64 of each thread's 255 with 8 warps. Not everything
fits everywhere (`largest_group`).
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_HEAD = 256
_LARGEST_GROUP = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """The settings of a kernel's launch."""

    block_m: int  # pairs of query and head per tile
    block_n: int  # keys per tile
    block_d: int  # features, including the padding of a head
    # num_warps, num_stages: Triton's options
    num_warps: int
    num_stages: int


# Keys per chunk, the unit in which decoding work is divided. With 64, an H200 takes 5 to 15% longer for 1 to 48 rows of
# 1,024 tokens, because more results are merged; longer contexts and larger batches take the same time. Chunks grow only
# with a row's own length (`max_chunks`): if they grew with the batch, a row's bits would depend on the batch. A program
# with several chunks reads them one after the other without a pause.
CHUNK = 128
# GPUs with the least shared memory per block: the smaller ones of Ampere and Ada, and, below this point, of Blackwell.
_SMALL = (86, 89)
_SMALL_BLACKWELL = 120


def max_chunks(kv_heads: int) -> int:
    """Maximum number of chunks per row, beyond which chunks grow: merging takes time, and with this many, a single row
    has work for twice the multiprocessors of a large GPU."""
    return min(max(256 // kv_heads, 16), 64)


def most_tiles(queries: int, rows: int, most: int, tile: int) -> int:
    """Maximum number of query tiles for rows with more than `most` queries, if all rows have this many queries
    together."""
    shortest = min(rows, queries // (most + 1))  # each of these has one nearly empty tile
    return shortest + max(queries - shortest * (most + 1), 0) // tile


def padded(size: int) -> int:
    """The next power of two, and at least the 16 that a matrix instruction needs."""
    return max(16, 1 << (size - 1).bit_length())


def largest_group(head_dim: int, in_float32: bool, capability: int) -> int:
    """Maximum number of heads that may share keys: 128, or fewer if the compiler cannot fit them into a block's memory.

    Args:
        in_float32: whether the products are in float32.
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
    """Programs of the decode kernel per multiprocessor, as many as its 65,536 registers allow: with 4 warps a thread
    has 235 to 255, and fewer for heads of up to 64 features. Results do not depend on it."""
    return max((3 if tiles.block_d <= 64 else 2) * 4 // tiles.num_warps, 1)


def decode_tiles(head_dim: int, group: int, product_bytes: int, capability: int, paged: bool) -> Tiles:
    """The tiles of rows with few queries; a tile of keys has about 16 KB, or less if many heads share it.

    Args:
        product_bytes: bytes of a number in the products.
        capability: 80, 90, ...
    """
    block_m, block_d = padded(group), padded(head_dim)
    block_n = min(max(16384 // (block_d * product_bytes), 16), 64)
    num_warps = 4
    if block_m >= 64:  # tests count what fewer threads or more keys would spill
        block_n = min(block_n, 32)
        # 64 rows belong to one warpgroup on Hopper: two would divide the features, and spill more.
        num_warps = 4 if 90 <= capability < 100 and block_m == 64 and block_d > 64 else 8
    # Two tiles in flight: of 5 stages, two are for the look-up in the block table.
    return Tiles(block_m, block_n, block_d, num_warps, num_stages=5 if paged else 3)


def prefill_tiles(
    head_dim: int, group: int, product_bytes: int, stored_bytes: int, capability: int, plain: bool, paged: bool
) -> Tiles:
    """The tiles of rows with many queries.

    128 rows of queries are two warpgroups of 64, the height of Hopper's matrix instruction. Keys and values then take
    1/64 byte per multiplication in 16 bits: an estimated 790 TFLOP/s would need 6 TB/s, which the second-level cache
    should provide, because the tiles of a row run at the same time.

    Args:
        product_bytes, stored_bytes: bytes of a number in the products and in the pages.
        capability: 80, 90, ...
        plain: whether there is no window, bias or cap.
    """
    block_d = padded(head_dim)
    small = _has_least_memory(capability)
    if product_bytes == 4:  # three tf32 products instead of one, and twice the memory
        if block_d > 128:
            return Tiles(max(32, padded(group)), 16, block_d, num_warps=8, num_stages=1 if small else 2)
        block_m = max(64, padded(group))
        # 64 rows belong to one warpgroup on Hopper. With two, Triton 3.6 reads beyond shared memory.
        num_warps = 4 if 90 <= capability < 100 and block_m == 64 else 8
        return Tiles(block_m, 32 if block_d <= 64 else 16, block_d, num_warps, num_stages=2)
    # Of 3 stages, one is for the look-up in the block table; otherwise each tile would wait for its entries. Widening 8
    # bits needs more registers, and so do changes to scores.
    large, narrow = capability >= 90 and not small, stored_bytes == 1 or not plain
    if block_d <= 64:
        return Tiles(128, 128 if large and not narrow else 64, block_d, num_warps=8, num_stages=3)
    if block_d <= 128:
        block_n = (128 if large else 64) // (2 if narrow else 1)
        return Tiles(128, block_n, block_d, num_warps=8, num_stages=3 if paged or not large else 2)
    block_m = 128 if large and not narrow else max(64, padded(group))
    return Tiles(block_m, 32, block_d, num_warps=8, num_stages=3 if paged else 2)
