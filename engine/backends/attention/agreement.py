"""Checks that queries, keys, lengths and tables match, for any backend."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata, Bias, ContentBias, Paged, Ragged


def check_shapes(
    q: Tensor, kv: Paged | Ragged, metadata: AttentionMetadata, bias: Bias | None, sinks: Tensor | None = None
) -> None:
    """Raises ValueError with the numbers if q [T, heads, head_dim], keys, values and biases do not match."""
    heads, head_dim = q.shape[1:]
    kv_heads = kv.keys.shape[-2]
    if heads % kv_heads or kv.keys.shape[-1] != head_dim or kv.keys.shape != kv.values.shape:
        raise ValueError(
            f"q {tuple(q.shape)}, keys {tuple(kv.keys.shape)} and values {tuple(kv.values.shape)} do not "
            "agree: heads must be a multiple of kv_heads, and head_dim the same"
        )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks have shape {list(sinks.shape)}, the queries have {heads} heads")
    tables = tables_of(bias)
    if any(table.shape[0] != heads for table in tables):
        raise ValueError(f"the bias has {tables[0].shape[0]} heads, the queries have {heads}")
    if isinstance(bias, ContentBias) and (heads != kv_heads or any(table.shape[2] != head_dim for table in tables)):
        shapes = ", ".join(str(tuple(table.shape)) for table in tables)
        raise ValueError(
            f"q {tuple(q.shape)}, {kv_heads} key heads and tables {shapes} do not agree: a content bias is for "
            "heads that share no keys, and head_dim the same"
        )
    if q.shape[0] < sum(metadata.query_lens):
        raise ValueError(f"q has {q.shape[0]} tokens, the rows have {sum(metadata.query_lens)} queries")


def check_lengths(metadata: AttentionMetadata, kv: Paged | Ragged, causal: bool) -> None:
    """Raises ValueError if lengths contradict each other or the block tables."""
    lens = np.asarray(metadata.query_lens, dtype=np.int64)
    context = np.asarray(metadata.context_lens, dtype=np.int64)
    if lens.shape != context.shape:
        raise ValueError(f"query_lens has {len(lens)} rows, context_lens has {len(context)}")
    if causal and bool((lens > context).any()):
        row = int((lens > context).argmax())
        raise ValueError(f"row {row} has {lens[row]} causal queries but a context of {context[row]} tokens")
    if isinstance(kv, Paged) and len(lens):
        tables, room = len(kv.block_tables), kv.block_tables.shape[1] * kv.keys.shape[1]
        if len(lens) > tables or int(context.max()) > room:
            raise ValueError(
                f"{len(lens)} rows with contexts up to {context.max()} tokens do not fit "
                f"{tables} block tables that hold {room} tokens each"
            )


def tables_of(bias: Bias | None) -> list[Tensor]:
    """The tables that a bias reads, each [heads, ...]."""
    if isinstance(bias, ContentBias):
        return [table for table in (bias.keys, bias.queries) if table is not None]
    return [] if bias is None else [bias.table]
