"""Scores that queries bring for distances, and keys that only one query sees, against a dense softmax in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_attention_reference import BACKEND, CPU, Row, mixed, paged
from torch import Tensor
from transformers.models.prophetnet.modeling_prophetnet import compute_relative_buckets

from engine.backends.attention.base import AttentionMetadata
from engine.backends.torch.attention import OwnKey, QueryBias
from engine.model.positions import QueryBuckets
from engine.model.query_buckets import buckets_of

BUCKETS, REACH = 7, 20


def brought(tokens: int, heads: int, kv_heads: int, head_dim: int) -> tuple[QueryBias, OwnKey]:
    """Random scores, columns in no order, so that no distance is taken for another, and keys."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.randn(tokens, BUCKETS, heads, generator=generator)
    columns = torch.randint(BUCKETS, (REACH + 3,), generator=generator)
    keys, values = torch.randn(2, tokens, kv_heads, head_dim, generator=generator)
    return QueryBias(scores, columns, REACH), OwnKey(keys, values, torch.randn(tokens, heads, generator=generator))


def taken(bias: QueryBias, own: OwnKey, part: slice | Tensor) -> dict[str, Any]:
    """What these tokens bring."""
    return {
        "bias": QueryBias(bias.scores[part], bias.columns, bias.zero),
        "own": OwnKey(own.keys[part], own.values[part], own.bias[part]),
    }


def dense(row: Row, queries: int, scale: float, bias: QueryBias, own: OwnKey) -> Tensor:
    """By the textbook, every pair on its own."""
    context, group = len(row.k), row.q.shape[1] // row.k.shape[1]
    q, k, v = row.q[context - queries :].double(), row.k.double(), row.v.double()
    k, v, own_keys, own_values = (x.double().repeat_interleave(group, 1) for x in (k, v, own.keys, own.values))
    distance = torch.arange(context) - torch.arange(context - queries, context)[:, None]
    column = bias.columns[(distance + bias.zero).clamp(0, len(bias.columns) - 1)]
    added = torch.stack([scores[columns] for scores, columns in zip(bias.scores.double(), column, strict=True)])
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale + added.permute(2, 0, 1)
    scores = scores.masked_fill(distance > 0, -math.inf)
    alone = torch.einsum("qhd,qhd->hq", q, own_keys) * scale + own.bias.double().T
    weights = torch.softmax(torch.cat((scores, alone[:, :, None]), -1), -1)
    return torch.einsum("hqk,khd->qhd", weights[..., :-1], v) + weights[..., -1].T[:, :, None] * own_values


def test_rows_over_pages_equal_dense_and_neighbours_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that decode, continue and prefill, heads that share keys; whatever in the pages is not theirs is NaN."""
    rows, query_lens = mixed(6, 2, 10)
    starts = [sum(query_lens[:row]) for row in range(len(rows))]
    bias, own = brought(sum(query_lens), 6, 2, 10)

    def attend(chosen: list[int]) -> list[Tensor]:
        lens = [query_lens[row] for row in chosen]
        q = torch.cat([rows[row].q[len(rows[row].q) - query_lens[row] :] for row in chosen])
        places = torch.cat([torch.arange(starts[row], starts[row] + query_lens[row]) for row in chosen])
        metadata = AttentionMetadata.build(lens, [len(rows[row].k) for row in chosen], CPU)
        kv = paged([rows[row] for row in chosen])
        return list(torch.split(BACKEND.attend(q, kv, metadata, scale=0.3, **taken(bias, own, places)), lens))

    together = attend([*range(len(rows))])
    for row, found in enumerate(together):
        brings = taken(bias, own, slice(starts[row], starts[row] + query_lens[row]))
        want = dense(rows[row], query_lens[row], 0.3, **brings)
        torch.testing.assert_close(found.double(), want, rtol=2e-5, atol=2e-5)
        (alone,) = attend([row])
        assert torch.equal(alone, found)
    monkeypatch.setattr("engine.backends.torch.attention_tiles.GROUP_BYTES", 1)
    assert all(map(torch.equal, attend([*range(len(rows))]), together))


def test_scores_of_other_shapes_are_refused() -> None:
    rows, query_lens = mixed(4, 4, 8)
    q, kv = torch.cat([row.q[:n] for row, n in zip(rows, query_lens, strict=True)]), paged(rows)
    metadata = AttentionMetadata.build(query_lens, [len(row.k) for row in rows], CPU)
    for tokens, heads in ((len(q) - 1, 4), (len(q), 3)):
        with pytest.raises(ValueError, match=r"the scores that its queries bring .* do not agree"):
            BACKEND.attend(q, kv, metadata, scale=1.0, bias=brought(tokens, heads, heads, 8)[0])


@pytest.mark.parametrize(
    ("buckets", "farthest"), [(32, 128), (6, 24), (12, 48), (2, 2), (9, 5), (40, 21), (7, 300), (17, 27)]
)
def test_buckets_are_the_references(buckets: int, farthest: int) -> None:
    distances = torch.arange(2 * farthest)
    found = buckets_of(QueryBuckets(buckets, farthest))[distances.clamp(max=farthest)]
    assert torch.equal(found, compute_relative_buckets(buckets, farthest, -distances).long())
