"""The index computations of the reference backend: it divides a ragged batch into tiles of queries and chunks of keys.

A tile is up to `width` consecutive queries of one row: 1 for rows that decode, 32 otherwise, cut at
multiples of 32 of the absolute position. Each tile processes the chunks of 128 keys that its queries see, cut at
multiples of 128 of the absolute position; if all of these keys are below position 32 or 64, its only chunk ends there.
These cuts depend only on positions, so a query processes the same keys in the same order whatever else is in the batch
and however its prompt was chunked.

If queries have no position among the keys (encoders, cross-attention), short rows have tiles of 4, 8 or 16: the beams
of a request, which read the same pages, are one row with few queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.backends.attention.agreement import check_lengths
from engine.backends.attention.base import AttentionMetadata, Chunks, Paged, Ragged, Sight, Window

TILE = 32
CHUNK = 128
# Sizes of a chunk whose tile sees no keys beyond it.
SIZES = (32, 64, CHUNK)
# Sizes of a tile whose queries have no position: multiples of four, as matrix products require.
WIDTHS = (4, 8, 16, TILE)
# Bytes of keys, values and scores per group of tiles: small enough for the last-level cache of a CPU, large enough to
# hide the cost of calling the operations.
GROUP_BYTES = 16 << 20

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a layer's shape that the index computations depend on. `lines`: the number (0 to 2) of tables
    of vectors by distance that a tile and a chunk read parts of."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: Sight | None
    lines: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One chunk of keys for each of the first `tiles` tiles of a group."""

    # the number of tiles that still have a chunk; these come first, because tiles are sorted by number of chunks
    tiles: int
    # [tiles * kv_heads * keys] rows of the keys viewed as [slots * kv_heads, head_dim], ordered by tile, head, key.
    # Indices of keys that no query of the tile sees point at a visible key, so nothing outside the row is ever read.
    rows: Tensor
    masked: int
    mask: Tensor | None  # [tiles - masked, 1, 1, width, keys] float32, 0 or -inf; None if masked == tiles
    first: Tensor  # [tiles, 1] int64 position of the chunk's first key
    distance: Tensor  # [tiles, 1] int64 first key's position minus the position of the tile's last query


@dataclass(frozen=True, slots=True)
class Group:
    """Tiles of one width and one chunk size that are computed together."""

    tiles: int
    keys: int  # keys per chunk
    # queries per tile. They are ordered from the last position to the first, so that the distance to key j of query i
    # is i + j + constant, which torch can express as a strided view.
    width: int
    queries: Tensor  # [tiles * width] int64 token of each query; unused entries repeat another query's
    tokens: Tensor  # int64 tokens that are actually computed, each once
    places: Tensor | None  # their indices in [tiles * width]; None if all are used in order
    steps: tuple[Step, ...]  # one step per chunk


def plan(metadata: AttentionMetadata, kv: Paged | Ragged, shape: Shape) -> tuple[Group, ...]:
    """The groups of tiles of one batch. Raises ValueError if lengths contradict each other or the block tables."""
    check_lengths(metadata, kv, shape.causal)
    lens = np.asarray(metadata.query_lens, dtype=np.int64)
    context = np.asarray(metadata.context_lens, dtype=np.int64)
    start = np.cumsum(lens) - lens
    two_way = np.zeros(len(lens), dtype=np.int64) if metadata.two_way is None else np.array(metadata.two_way, np.int64)
    groups: list[Group] = []
    widths = _widths(lens, shape.causal)
    for width in np.unique(widths[lens > 0]).tolist():
        rows = np.flatnonzero((widths == width) & (lens > 0))
        tiles = _cut(rows, lens[rows], context[rows], start[rows], two_way[rows], width, shape)
        for keys in SIZES:
            sized = tiles.take(np.flatnonzero(tiles.keys == keys))
            groups += [_group(part, keys, kv, shape) for part in sized.parts(_tile_bytes(width, keys, shape))]
    return tuple(groups)


def _widths(lens: Ints, causal: bool) -> Ints:
    sizes = np.array((TILE,) if causal else WIDTHS)
    width: Ints = sizes[np.searchsorted(sizes, np.minimum(lens, TILE))]
    return np.where(lens == 1, 1, width)


def _tile_bytes(width: int, keys: int, shape: Shape) -> int:
    lines = shape.lines * shape.heads * (width + keys) * (shape.head_dim + width)
    return 4 * (keys * (2 * shape.kv_heads * shape.head_dim + (shape.heads + 3 * shape.kv_heads) * width) + lines)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles sorted by falling number of chunks; each field has one entry per tile."""

    width: int
    row: Ints  # row of the batch
    token: Ints  # index of the row's first query among the tokens
    origin: Ints  # position of the row's first query
    length: Ints  # queries of the row
    context: Ints  # keys of the row
    two_way: Ints  # 1: its queries see all later keys; 2: and all earlier ones
    base: Ints  # position of the tile's first query
    low: Ints  # positions [low, high) are visible to some query of the tile
    high: Ints
    all_low: Ints  # positions [all_low, all_high) are visible to all of them
    all_high: Ints
    keys: Ints  # per chunk
    first: Ints  # first chunk
    chunks: Ints  # number of chunks

    def take(self, index: Ints | slice) -> _Tiles:
        fields = (f for f in self.__dataclass_fields__ if f != "width")
        return _Tiles(self.width, **{f: getattr(self, f)[index] for f in fields})

    def parts(self, tile_bytes: int) -> list[_Tiles]:
        size = max(1, GROUP_BYTES // tile_bytes)
        return [self.take(slice(i, i + size)) for i in range(0, len(self.row), size)]


def _cut(rows: Ints, lens: Ints, context: Ints, start: Ints, two_way: Ints, width: int, shape: Shape) -> _Tiles:
    origin = context - lens if shape.causal else np.zeros_like(context)
    counts = (origin + lens - 1) // width - origin // width + 1
    of = np.repeat(np.arange(len(rows)), counts)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    base = (origin[of] // width + nth) * width
    first_query = np.maximum(base, origin[of])
    last_query = np.minimum(base + width, (origin + lens)[of]) - 1
    low, all_low = np.zeros_like(base), np.zeros_like(base)
    high = all_high = context[of]
    if shape.causal:
        high, all_high = np.minimum(high, last_query + 1), np.minimum(all_high, first_query + 1)
    if isinstance(shape.window, Chunks):
        size = shape.window.size
        low, all_low = first_query // size * size, last_query // size * size
    if isinstance(shape.window, Window):
        left, right = shape.window.left, shape.window.right
        low, all_low = np.maximum(low, first_query - left), np.maximum(all_low, last_query - left)
        high, all_high = np.minimum(high, last_query + right + 1), np.minimum(all_high, first_query + right + 1)
    ahead = two_way[of]
    high, all_high = np.where(ahead, context[of], high), np.where(ahead, context[of], all_high)
    low, all_low = np.where(ahead == 2, 0, low), np.where(ahead == 2, 0, all_low)
    first = low // CHUNK
    chunks = np.where(high > low, -(-high // CHUNK) - first, 0)
    row = (rows[of], start[of], origin[of], lens[of], context[of], ahead)
    sizes = np.array(SIZES)
    keys = sizes[np.searchsorted(sizes, np.minimum(high, CHUNK))]
    tiles = _Tiles(width, *row, base, low, high, all_low, all_high, keys, first, chunks)
    order = np.argsort(-chunks, kind="stable")
    return tiles.take(order[: np.count_nonzero(chunks)])  # a query that sees no key needs no work and gives 0


def _group(tiles: _Tiles, keys: int, kv: Paged | Ragged, shape: Shape) -> Group:
    device, width, count = kv.keys.device, tiles.width, len(tiles.row)

    def put(array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    ordinal = tiles.base[:, None] + np.arange(width)[::-1] - tiles.origin[:, None]
    valid = ((ordinal >= 0) & (ordinal < tiles.length[:, None])).ravel()
    queries = (tiles.token[:, None] + np.clip(ordinal, 0, tiles.length[:, None] - 1)).ravel()

    # One entry per (step, tile), with steps outermost.
    live = count - np.searchsorted(tiles.chunks[::-1], np.arange(tiles.chunks[0]), side="right")
    begin = np.cumsum(live) - live
    step = np.repeat(np.arange(len(live)), live)
    tile = np.arange(len(step)) - begin[step]
    key = (tiles.first[tile] + step) * CHUNK
    partial = (key < tiles.all_low[tile]) | (key + keys > tiles.all_high[tile])
    masked = np.minimum.reduceat(np.where(partial, tile, live[step]), begin)

    rows = _rows(put(key), put(tile), put(tiles.row), put(tiles.low), put(tiles.high), keys, kv, shape)
    first = put(key)[:, None]
    distance = put(key - tiles.base[tile] - (width - 1))[:, None]
    select = np.flatnonzero(tile >= masked[step])
    base, context = put(tiles.base[tile[select]]), put(tiles.context[tile[select]])
    ahead = put(tiles.two_way[tile[select]])
    masks = _masks(put(key[select]), base, context, ahead, width, keys, shape)
    steps = tuple(
        Step(n, r, m, mask.view(n - m, 1, 1, width, keys) if m < n else None, f, d)
        for n, r, m, mask, f, d in zip(
            live.tolist(),
            torch.split(rows, (live * shape.kv_heads * keys).tolist()),
            masked.tolist(),
            torch.split(masks, (live - masked).tolist()),
            torch.split(first, live.tolist()),
            torch.split(distance, live.tolist()),
            strict=True,
        )
    )
    whole = bool(valid.all())
    tokens = put(queries[valid])
    return Group(count, keys, width, put(queries), tokens, None if whole else put(np.flatnonzero(valid)), steps)


def _rows(
    key: Tensor, tile: Tensor, row: Tensor, low: Tensor, high: Tensor, keys: int, kv: Paged | Ragged, shape: Shape
) -> Tensor:
    """[entries * kv_heads * keys] rows of the keys viewed as [slots * kv_heads, head_dim]."""
    position = key[:, None] + torch.arange(keys, device=key.device)
    position = torch.maximum(torch.minimum(position, high[tile, None] - 1), low[tile, None])
    row = row[tile, None]
    if isinstance(kv, Paged):
        size, tables = kv.keys.shape[1], kv.block_tables
        page = position // size
        block = tables.reshape(-1)[row * tables.shape[1] + page]
        slot = block.to(torch.int64) * size + (position - page * size)
    else:
        slot = kv.starts[row] + position
    heads = torch.arange(shape.kv_heads, device=key.device)
    rows = (slot[:, None, :] * shape.kv_heads + heads[:, None]).reshape(-1)
    # 32-bit indices halve the memory that every layer reads again.
    return rows.to(torch.int32) if kv.keys.numel() // kv.keys.shape[-1] < 2**31 else rows


def _masks(key: Tensor, base: Tensor, context: Tensor, two_way: Tensor, width: int, keys: int, shape: Shape) -> Tensor:
    """[entries, width, keys] float32: 0 where the query sees the key, -inf elsewhere."""
    places = (key[:, None] + torch.arange(keys, device=key.device))[:, None, :]
    queries = (base[:, None] + torch.arange(width - 1, -1, -1, device=key.device))[:, :, None]
    ahead, all_seen = two_way[:, None, None] > 0, two_way[:, None, None] == 2
    seen = (places < context[:, None, None]).expand(-1, width, -1)
    if shape.causal:
        seen = seen & ((places <= queries) | ahead)
    if isinstance(shape.window, Chunks):
        seen = seen & ((places >= queries // shape.window.size * shape.window.size) | all_seen)
    if isinstance(shape.window, Window):
        seen = seen & ((places >= queries - shape.window.left) | all_seen)
        seen = seen & ((places <= queries + shape.window.right) | ahead)
    zero = torch.zeros((), device=key.device)
    return torch.where(seen, zero, zero - torch.inf)
