"""Attention between some tokens of one row, in float32. Attention that divides a row into parts calls it for each
part."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, [Tp, heads, head_dim] each."""


def by_head(x: Tensor) -> Tensor:
    """float32 [heads, T, head_dim] of x [T, heads, head_dim]."""
    return x.float().transpose(0, 1).contiguous()


def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Results [heads, queries, head_dim] of queries, keys and values [heads, tokens, head_dim]. `mask`: added to the
    scores, or False where a query does not see a key; it is broadcast to [1, heads, queries, keys]."""
    return F.scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask, scale=scale)[0]
