"""Attention to some blocks of a row, in torch; time and memory grow linearly with the length of a row.

Each row is divided into blocks by its own length, so its result does not depend on what else is in the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata
from engine.backends.torch.attention_row import Heads, by_head
from engine.backends.torch.attention_row import attend as attend_row


def attend(
    heads: Heads,
    metadata: AttentionMetadata,
    scale: float,
    *,
    size: int,
    whole: int,
    first_counts: int,
) -> Tensor:
    """The attention of each token to its row: [Tp, heads, head_dim].

    A token sees its own block, the adjacent ones, and the first and the last block; tokens of these two see all.
    Scores, softmax and sums are in float32. Positions past the rows get zeros.

    Args:
        heads: queries, keys and values, [Tp, heads, head_dim] each.
        size: tokens per block; the last block may have fewer.
        whole: in a row of up to this many tokens (at least five blocks), all tokens see all.
        first_counts: how often keys of the first block count for tokens that do not see all.
    """
    out = heads[0].new_zeros(heads[0].shape)
    start = 0
    for length in metadata.query_lens:
        row = slice(start, start + length)
        start += length
        if not length:
            continue
        queries, keys, values = (by_head(x[row]) for x in heads)
        if length <= whole:
            found = attend_row(queries, keys, values, scale)
        else:
            found = _attend_sparsely(queries, keys, values, scale, size, first_counts)
        out[row] = found.transpose(0, 1)
    return out


def _attend_sparsely(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, size: int, first_counts: int
) -> Tensor:
    """The same for one row that has more blocks than its tokens see."""
    length = queries.shape[1]
    last = (length - 1) // size * size
    found = torch.empty_like(queries)
    for begin in range(0, length, size):
        own = slice(begin, min(begin + size, length))
        if begin in (0, last):
            found[:, own] = attend_row(queries[:, own], keys, values, scale)
            continue
        # The first and the last block may be among the neighbours, and then count once for that.
        near = slice(max(begin - size, size), min(begin + 2 * size, last))
        seen, given = (torch.cat((x[:, :size], x[:, near], x[:, last:]), 1) for x in (keys, values))
        bias = seen.new_zeros(seen.shape[1])
        bias[:size] = math.log(first_counts)
        mask = bias.expand(1, 1, own.stop - own.start, -1)
        found[:, own] = attend_row(queries[:, own], seen, given, scale, mask)
    return found
