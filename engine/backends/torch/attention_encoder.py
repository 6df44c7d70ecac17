"""Attention of whole rows without a cache on a CPU, with torch's fused kernel.

Rows of equal length are computed together; nothing is padded. The kernel (`scaled_dot_product_attention`, after
arXiv:2205.14135) divides each row's queries and keys by the row's own length, and never reads another row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata, Ragged

# float32 numbers in 64 bytes: if the size of heads is a multiple of this, every row has the same alignment for vector
# loads, and so the same bits at any address.
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Rows:
    """N rows with the same number of queries and of keys. `queries`, `keys`: [N * queries], [N * keys] int64 indices of
    tokens."""

    count: int
    queries: Tensor
    keys: Tensor


def serves(q: Tensor, kv: Ragged, metadata: AttentionMetadata) -> bool:
    """Whether `attend` computes queries of this shape over these keys, if each sees all of its row."""
    return (
        q.device.type == "cpu"
        and q.shape[1:] == kv.keys.shape[1:] == kv.values.shape[1:]
        and q.shape[2] % _ALIGNED == 0
        and sum(metadata.query_lens) <= len(q)
    )


def attend(q: Tensor, kv: Ragged, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Attention of q [T, heads, head_dim] over each row's own keys; returns [T, heads, head_dim].

    Scores, softmax and sums are in float32. Tokens past the sum of the query lengths, and queries without keys, get
    zeros.
    """
    out, shape = q.new_zeros(q.shape), q.shape[1:]
    for rows in _rows(metadata, kv):
        queries, keys, values = (
            x.index_select(0, index).float().view(rows.count, -1, *shape).transpose(1, 2)
            for x, index in ((q, rows.queries), (kv.keys, rows.keys), (kv.values, rows.keys))
        )
        result = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
        out.index_copy_(0, rows.queries, result.transpose(1, 2).reshape(-1, *shape).to(q.dtype))
    return out


def _rows(metadata: AttentionMetadata, kv: Ragged) -> tuple[Rows, ...]:
    """The rows of this batch by their lengths: computed by the first layer of a step, shared by the others."""
    key = ("whole rows", kv.starts.data_ptr(), kv.starts.shape, kv.starts.stride())
    found = metadata.cache.get(key)
    if found is None:
        # The tensor is kept too, so that its address stays taken and remains a valid key.
        found = metadata.cache[key] = (kv.starts, _group(metadata, kv.starts.tolist()))
    rows: tuple[Rows, ...] = found[1]  # type: ignore[index]
    return rows


def _group(metadata: AttentionMetadata, key_starts: list[int]) -> tuple[Rows, ...]:
    alike: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    start = 0
    for queries, keys, first in zip(metadata.query_lens, metadata.context_lens, key_starts, strict=True):
        if queries and keys:
            starts = alike.setdefault((queries, keys), ([], []))
            starts[0].append(start)
            starts[1].append(first)
        start += queries
    return tuple(
        Rows(len(starts[0]), *(_tokens(first, length) for first, length in zip(starts, lengths, strict=True)))
        for lengths, starts in alike.items()
    )


def _tokens(starts: list[int], length: int) -> Tensor:
    return (torch.tensor(starts)[:, None] + torch.arange(length)).view(-1)
