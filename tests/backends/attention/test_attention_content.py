"""Terms of the scores by distance and content: the reference backend against a dense softmax in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_reference import BACKEND, CPU, Part, Row, make_row, mixed, paged, ragged
from torch import Tensor

from engine.backends.attention.base import AttentionMetadata, ContentBias, Paged, Ragged, Window
from engine.backends.attention.selection import select
from engine.errors import ConfigError


def content(
    heads: int, head_dim: int, *, vectors: int = 11, reach: int = 40, terms: str = "both", seed: int = 3
) -> ContentBias:
    """Random tables, and columns that follow no order at all, so that no distance is taken for another."""
    generator = torch.Generator().manual_seed(seed)
    keys, queries = torch.randn(2, heads, vectors, head_dim, generator=generator)
    columns = torch.randint(vectors, (2 * reach + 4,), generator=generator)
    return ContentBias(None if terms == "queries" else keys, None if terms == "keys" else queries, columns, reach)


def dense(
    row: Row,
    bias: ContentBias,
    queries: int,
    *,
    scale: float,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
) -> Tensor:
    """By the textbook in float64: every term of every pair on its own."""
    q, k, v = row.q.double(), row.k.double(), row.v.double()
    first = len(k) - queries if causal else 0
    q = q[first : first + queries]
    distance = torch.arange(len(k)) - torch.arange(first, first + queries)[:, None]
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    column = bias.columns[(distance + bias.zero).clamp(0, len(bias.columns) - 1)]
    if bias.keys is not None:
        scores += torch.einsum("qhd,hqkd->hqk", q, bias.keys.double()[:, column]) * scale
    if bias.queries is not None:
        scores += torch.einsum("khd,hqkd->hqk", k, bias.queries.double()[:, column]) * scale
    seen = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= (distance >= -window.left) & (distance <= window.right)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(~seen, -math.inf), -1), v)


def attend(rows: list[Row], query_lens: list[int], kv: Paged | Ragged, bias: ContentBias, **how: Any) -> list[Tensor]:
    causal = how.setdefault("causal", False)
    q = torch.cat([row.q[len(row.q) - n :] if causal else row.q[:n] for row, n in zip(rows, query_lens, strict=True)])
    metadata = AttentionMetadata.build(query_lens, [len(row.k) for row in rows], CPU)
    out = BACKEND.attend(q, kv, metadata, bias=bias, **how)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    return list(torch.split(out, query_lens))


def inputs(lengths: list[int], heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> list[Row]:
    return [make_row(i, n, heads, heads, head_dim, dtype) for i, n in enumerate(lengths)]


def assert_exact(rows: list[Row], query_lens: list[int], kv: Paged | Ragged, bias: ContentBias, **how: Any) -> None:
    how.setdefault("scale", 0.3)
    for row, n, got in zip(rows, query_lens, attend(rows, query_lens, kv, bias, **how), strict=True):
        torch.testing.assert_close(got.double(), dense(row, bias, n, **how), rtol=2e-5, atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([2, 5, 8, 24]),
    vectors=st.integers(1, 40),
    reach=st.sampled_from([0, 3, 40, 310]),
    terms=st.sampled_from(["both", "keys", "queries"]),
)
def test_any_batch_of_inputs_equals_dense(
    lengths: list[int], heads: int, head_dim: int, vectors: int, reach: int, terms: str
) -> None:
    rows = inputs(lengths, heads, head_dim)
    bias = content(heads, head_dim, vectors=vectors, reach=reach, terms=terms, seed=sum(lengths))
    assert_exact(rows, lengths, ragged(rows), bias, scale=1 / math.sqrt(3 * head_dim))


@pytest.mark.parametrize("how", [{}, {"window": Window(20, 33)}, {"softcap": 2.0}], ids=["", "window", "softcap"])
@pytest.mark.parametrize("head_dim", [6, 16])
def test_it_joins_with_masks_and_caps(how: dict[str, Any], head_dim: int) -> None:
    lengths = [1, 2, 4, 5, 31, 32, 33, 64, 65, 127, 128, 129, 257, 300]
    rows = inputs(lengths, 3, head_dim)
    assert_exact(rows, lengths, ragged(rows), content(3, head_dim), **how)


@pytest.mark.parametrize("terms", ["both", "keys", "queries"])
def test_rows_over_pages_equal_dense(terms: str) -> None:
    """Rows that decode, continue and prefill; whatever in the pages is not theirs is NaN."""
    rows, query_lens = mixed(3, 3, 16)
    bias = content(3, 16, terms=terms)
    assert_exact(rows, query_lens, paged(rows, poison=math.nan), bias, causal=True)
    assert_exact(rows, query_lens, paged(rows, poison=math.inf), bias, causal=True, window=Window(50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [300, 1, 3, 7, 20, 33, 64, 100, 128, 160, 2, 290]
    rows = inputs(lengths, 3, 16, dtype)
    plain = content(3, 16, reach=200)
    assert plain.keys is not None
    assert plain.queries is not None
    bias = ContentBias(plain.keys.to(dtype), plain.queries.to(dtype), plain.columns, plain.zero)
    together = attend(rows, lengths, ragged(rows), bias, scale=0.2)
    for row, n, crowd in zip(rows, lengths, together, strict=True):
        (alone,) = attend([row], [n], ragged([row]), bias, scale=0.2)
        assert torch.equal(alone, crowd)
    reverse = attend(rows[::-1], lengths[::-1], ragged(rows[::-1]), bias, scale=0.2)[::-1]
    assert all(map(torch.equal, together, reverse))
    monkeypatch.setattr("engine.backends.torch.attention_tiles.GROUP_BYTES", 1)
    assert all(map(torch.equal, together, attend(rows, lengths, ragged(rows), bias, scale=0.2)))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poisoned_neighbours_reach_no_row(poison: float) -> None:
    lengths = [40, 5, 130, 1, 64, 200]
    rows = inputs(lengths, 2, 8)
    want = attend(rows, lengths, ragged(rows), content(2, 8), scale=0.5)
    for row in rows[::2]:
        for tensor in (row.q, row.k, row.v):
            tensor.fill_(poison)
    got = attend(rows, lengths, ragged(rows), content(2, 8), scale=0.5)
    assert all(map(torch.equal, want[1::2], got[1::2]))
    assert not any(bool(out.isfinite().any()) for out in got[::2])


def test_distances_beyond_the_columns_take_the_last() -> None:
    """Columns of three distances are those of any number whose ends repeat."""
    rows = inputs([150], 2, 8)
    short = content(2, 8)
    short = ContentBias(short.keys, short.queries, torch.tensor([4, 9, 2]), zero=1)
    long = ContentBias(short.keys, short.queries, torch.tensor([4] * 149 + [9] + [2] * 149), zero=149)
    (got,), (want,) = (attend(rows, [150], ragged(rows), bias, scale=0.5) for bias in (short, long))
    assert torch.equal(got, want)


def test_heads_that_share_keys_are_refused() -> None:
    rows = [make_row(0, 20, 4, 2, 8, torch.float32)]
    with pytest.raises(ValueError, match="a content bias is for heads that share no keys, and head_dim the same"):
        attend(rows, [20], ragged(rows), content(4, 8), scale=1.0)
    rows = inputs([20], 4, 8)
    with pytest.raises(ValueError, match="and head_dim the same"):
        attend(rows, [20], ragged(rows), content(4, 16), scale=1.0)
    with pytest.raises(ValueError, match="the bias has 3 heads, the queries have 4"):
        attend(rows, [20], ragged(rows), content(3, 8), scale=1.0)
    with pytest.raises(ConfigError, match="torch attention does not support a content bias for heads that share keys"):
        select("cpu", [Part(content_bias=True)])
    select("cpu", [Part(kv_heads=4, content_bias=True)])
