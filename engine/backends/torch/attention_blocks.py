"""Attention in a window and to blocks of tokens, in torch; memory grows linearly with the length of a row.

Each row is divided by its own length, so its result does not depend on what else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata, DistanceBias, Window
from engine.backends.torch.attention_row import Heads, by_head
from engine.backends.torch.attention_row import attend as attend_row

# Queries at a time, if the window is narrower than that.
_PART = 64


def attend(
    heads: Heads,
    of_blocks: tuple[Tensor, Tensor],
    metadata: AttentionMetadata,
    size: int,
    window: Window,
    scale: float,
    bias: DistanceBias,
    block_bias: DistanceBias,
) -> Tensor:
    """The attention of each token to its row, within its window and to the blocks: [Tp, heads, head_dim].

    Scores, softmax and sums are in float32. Positions past the rows get zeros.

    Args:
        heads: queries, keys and values, [Tp, heads, head_dim] each.
        of_blocks: keys and values, [blocks, heads, head_dim] each, in the order of the rows.
        size: tokens per block; tokens after a row's last whole block belong to that block.
        bias: bias by the distance from a query to a key.
        block_bias: bias by the distance from a query's block to a key's.
    """
    out = heads[0].new_zeros(heads[0].shape)
    start = first = 0
    for length in metadata.query_lens:
        count = length // size
        row, own = slice(start, start + length), slice(first, first + count)
        queries, keys, values = (by_head(x[row]) for x in heads)
        found = _attend_row(
            queries, (keys, values), tuple(by_head(x[own]) for x in of_blocks), size, window, scale, bias, block_bias
        )
        out[row] = found.transpose(0, 1)
        start, first = start + length, first + count
    return out


def _attend_row(
    queries: Tensor,
    near: tuple[Tensor, ...],
    of_blocks: tuple[Tensor, ...],
    size: int,
    window: Window,
    scale: float,
    bias: DistanceBias,
    block_bias: DistanceBias,
) -> Tensor:
    """The same for one row, all as [heads, T, head_dim]."""
    length, count = queries.shape[1], of_blocks[0].shape[1]
    width = max(_PART, window.left)
    places = torch.arange(length, device=queries.device)
    blocks = torch.arange(count, device=queries.device)
    found = torch.empty_like(queries)
    for begin in range(0, length, width):
        end = min(begin + width, length)
        low, high = max(begin - window.left, 0), min(end + window.right, length)
        distances = places[low:high] - places[begin:end, None]
        hidden = (distances < -window.left) | (distances > window.right)
        scores = _of(bias, distances).masked_fill_(hidden, -torch.inf)
        if count:
            own = (places[begin:end] // size).clamp_(max=count - 1)
            scores = torch.cat((_of(block_bias, blocks - own[:, None]), scores), 2)
        keys, values = (torch.cat((block, token[:, low:high]), 1) for block, token in zip(of_blocks, near, strict=True))
        found[:, begin:end] = attend_row(queries[:, begin:end], keys, values, scale, scores[None])
    return found


def _of(bias: DistanceBias, distances: Tensor) -> Tensor:
    """[heads, queries, keys] bias of distances [queries, keys]."""
    columns = (distances + bias.zero).clamp_(0, bias.table.shape[1] - 1)
    return bias.table.index_select(1, columns.view(-1)).view(-1, *distances.shape)
