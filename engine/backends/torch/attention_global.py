"""Attention in a window with global tokens, in torch; time and memory grow linearly with the length of a row.

Each row is divided by its own length, so its result does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata, Window
from engine.backends.torch.attention_row import Heads, by_head
from engine.backends.torch.attention_row import attend as attend_row

# Queries at a time, if the window is narrower than that.
_PART = 64


def attend(
    heads: Heads,
    of_global: Heads,
    metadata: AttentionMetadata,
    global_tokens: Sequence[range],
    window: Window,
    scale: float,
) -> Tensor:
    """The attention of each token to its row: [Tp, heads, head_dim].

    A token sees the tokens in its window and the global ones, each once; a global token sees all, through `of_global`.
    Scores, softmax and sums are in float32. Positions past the rows get zeros.

    Args:
        heads, of_global: queries, keys and values, [Tp, heads, head_dim] each.
        global_tokens: for each row the positions of its global tokens, counted from its beginning.
    """
    out = heads[0].new_zeros(heads[0].shape)
    start = 0
    for length, places in zip(metadata.query_lens, global_tokens, strict=True):
        row = slice(start, start + length)
        start += length
        if not length:
            continue
        queries, keys, values = (by_head(x[row]) for x in heads)
        out[row] = _attend_near(queries, keys, values, len(places), window, scale).transpose(0, 1)
        if len(places):
            seen, given = (by_head(x[row]) for x in of_global[1:])
            found = attend_row(by_head(of_global[0][row][: len(places)]), seen, given, scale)
            out[row][: len(places)] = found.transpose(0, 1).to(out.dtype)
    return out


def _attend_near(queries: Tensor, keys: Tensor, values: Tensor, count: int, window: Window, scale: float) -> Tensor:
    """The attention of one row's tokens to nearby tokens and to the first `count`, which are global: [heads, T,
    head_dim], all of this shape."""
    length, size = queries.shape[1], max(_PART, window.left)
    places = torch.arange(length, device=queries.device)
    found = torch.empty_like(queries)
    for begin in range(0, length, size):
        end = min(begin + size, length)
        # Global tokens come before all other visible tokens, and are not neighbours of others.
        low = max(begin - window.left, count)
        high = max(min(end + window.right, length), low)
        distances = places[low:high] - places[begin:end, None]
        near = (distances >= -window.left) & (distances <= window.right)
        seen = torch.cat((near.new_ones(end - begin, count), near), 1)
        ours, theirs = (torch.cat((x[:, :count], x[:, low:high]), 1) for x in (keys, values))
        found[:, begin:end] = attend_row(queries[:, begin:end], ours, theirs, scale, seen[None, None])
    return found
