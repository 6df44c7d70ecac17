"""The reference backend against a dense float64 softmax, and the promises that it makes to the bit."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    Chunks,
    DistanceBias,
    Paged,
    PositionBias,
    Ragged,
    Sight,
    Window,
)
from engine.backends.attention.selection import select
from engine.backends.torch.attention import TorchReference
from engine.backends.torch.attention_tiles import SIZES, Group, Shape, plan
from engine.errors import ConfigError

BACKEND = TorchReference()
CPU = torch.device("cpu")


@dataclass
class Row:
    """The whole history of one sequence: q [context, heads, head_dim], k and v [context, kv_heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor


def make_row(seed: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Row:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(length, count, head_dim, generator=generator).to(dtype) for count in (heads, kv_heads, kv_heads)
    )
    return Row(q, k, v)


def paged(rows: list[Row], block_size: int = 16, seed: int = 0, poison: float = math.nan) -> Paged:
    """Every row's keys in scattered pages. All that belongs to no row is poison, block 0 included."""
    pages = [-(-len(row.k) // block_size) for row in rows]
    blocks = sum(pages) + 3
    order = (torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    shape = (blocks, block_size, *rows[0].k.shape[1:])
    keys, values = (torch.full(shape, poison, dtype=rows[0].k.dtype) for _ in range(2))
    tables = torch.zeros(len(rows), max(pages) + 1, dtype=torch.int32)
    for r, row in enumerate(rows):
        for page in range(pages[r]):
            block = tables[r, page] = order.pop()
            part = slice(page * block_size, (page + 1) * block_size)
            keys[block, : len(row.k[part])] = row.k[part]
            values[block, : len(row.v[part])] = row.v[part]
    return Paged(keys, values, tables)


def ragged(rows: list[Row]) -> Ragged:
    starts = torch.tensor([0] + [len(row.k) for row in rows]).cumsum(0)[:-1].int()
    return Ragged(torch.cat([row.k for row in rows]), torch.cat([row.v for row in rows]), starts)


def run(rows: list[Row], query_lens: list[int], kv: Paged | Ragged | None = None, **how: Any) -> list[Tensor]:
    """The result of each row's last (causal) or first queries."""
    causal = how.get("causal", True)
    q = torch.cat([row.q[len(row.q) - n :] if causal else row.q[:n] for row, n in zip(rows, query_lens, strict=True)])
    metadata = AttentionMetadata.build(query_lens, [len(row.k) for row in rows], CPU)
    how.setdefault("scale", rows[0].q.shape[-1] ** -0.5)
    out = BACKEND.attend(q, kv if kv is not None else paged(rows), metadata, **how)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    return list(torch.split(out, query_lens))


def dense(
    row: Row,
    queries: int,
    *,
    causal: bool = True,
    window: Sight | None = None,
    scale: float | None = None,
    bias: DistanceBias | PositionBias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same in float64 by the textbook, one row at a time."""
    group = row.q.shape[1] // row.k.shape[1]
    q, k, v = row.q.double(), row.k.double().repeat_interleave(group, 1), row.v.double().repeat_interleave(group, 1)
    context = len(k)
    first = context - queries if causal else 0
    distance = torch.arange(context) - torch.arange(first, first + queries)[:, None]
    seen = torch.ones(queries, context, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if isinstance(window, Chunks):
        chunk = torch.arange(context) // window.size
        seen &= chunk >= chunk[first : first + queries, None]
    if isinstance(window, Window):
        seen &= (distance >= -window.left) & (distance <= window.right)
    scores = torch.einsum("qhd,khd->hqk", q[first : first + queries], k) * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        column = distance + bias.zero if isinstance(bias, DistanceBias) else torch.arange(context).expand_as(distance)
        scores = scores + bias.table.double()[:, column.clamp(0, bias.table.shape[1] - 1)]
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, queries, 1)], -1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1)[..., :context], v)


def assert_exact(rows: list[Row], query_lens: list[int], tolerance: float = 1e-5, **how: Any) -> None:
    kv = how.pop("kv", None)
    for row, n, got in zip(rows, query_lens, run(rows, query_lens, kv, **how), strict=True):
        want = dense(row, n, **how)
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def label(value: object) -> str:
    """A short test id for a set of options."""
    return ("+".join(value) or "plain") if isinstance(value, dict) else str(value)


# Rows that decode, rows that prefill whole, rows that continue: (queries, context).
MIXED = [(1, 1), (1, 300), (5, 5), (33, 33), (40, 170), (1, 128), (129, 129), (2, 257), (31, 64), (1, 47)]


def mixed(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[list[Row], list[int]]:
    rows = [make_row(i, context, heads, kv_heads, head_dim, dtype) for i, (_, context) in enumerate(MIXED)]
    return rows, [queries for queries, _ in MIXED]


def table(heads: int, columns: int, zero: int) -> DistanceBias:
    return DistanceBias(torch.randn(heads, columns, generator=torch.Generator().manual_seed(9)), zero)


def by_position(heads: int, columns: int) -> PositionBias:
    return PositionBias(torch.randn(heads, columns, generator=torch.Generator().manual_seed(8)))


@pytest.mark.parametrize("head_dim", [8, 16, 64])
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (2, 3), (1, 4), (2, 6)])
def test_mixed_batch_equals_dense(kv_heads: int, group: int, head_dim: int) -> None:
    assert_exact(*mixed(kv_heads * group, kv_heads, head_dim))


@pytest.mark.parametrize(
    "how",
    [
        {"window": Window(0)},
        {"window": Window(40)},
        {"window": Chunks(1)},
        {"window": Chunks(50)},
        {"window": Chunks(128), "softcap": 5.0, "sinks": torch.linspace(-3, 9, 6)},
        {"window": Window(127)},
        {"softcap": 2.0},
        {"sinks": torch.linspace(-3, 9, 6), "window": Window(20)},
        {"bias": table(6, 65, 32)},
        {"bias": table(6, 400, 399)},
        {"bias": table(6, 1, 0)},
        {"bias": by_position(6, 300)},
        {"bias": by_position(6, 40)},
        {"window": Window(90), "softcap": 5.0, "bias": by_position(6, 250), "scale": 0.3},
        {"scale": 1.0},
        {"window": Window(150), "softcap": 5.0, "bias": table(6, 33, 30), "scale": 0.3},
    ],
    ids=label,
)
def test_each_causal_mask_equals_dense(how: dict[str, Any]) -> None:
    assert_exact(*mixed(6, 2, 16), **how)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"window": Window(10, 10)},
        {"window": Window(0, 130)},
        {"bias": table(6, 129, 64)},
        {"window": Window(64, 64), "softcap": 3.0, "bias": table(6, 9, 4)},
        {"window": Window(64, 64), "softcap": 3.0, "bias": by_position(6, 290)},
    ],
    ids=label,
)
@pytest.mark.parametrize("cached", [False, True], ids=["ragged", "paged"])
def test_each_encoder_mask_equals_dense(how: dict[str, Any], cached: bool) -> None:
    rows = [make_row(i, n, 6, 2, 16, torch.float32) for i, n in enumerate([1, 7, 32, 33, 128, 200, 300])]
    kv = paged(rows) if cached else ragged(rows)
    assert_exact(rows, [len(row.q) for row in rows], causal=False, kv=kv, **how)


@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (1, 5), (2, 3)])
def test_a_bias_by_position_reaches_over_many_chunks(kv_heads: int, group: int) -> None:
    """Rows that decode, continue and prefill, up to nine chunks of keys; the table is as long as the longest."""
    heads = kv_heads * group
    shapes = [(1, 1100), (1, 640), (70, 1000), (300, 300), (2, 129), (1, 1)]
    rows = [make_row(i, context, heads, kv_heads, 8, torch.float32) for i, (_, context) in enumerate(shapes)]
    slopes = 0.5 ** torch.arange(1, heads + 1)[:, None]
    rounded = (slopes.bfloat16() * torch.arange(1100)).float() * 8**-0.5
    assert_exact(rows, [queries for queries, _ in shapes], tolerance=3e-5, bias=PositionBias(rounded))


def test_cross_attention_has_more_keys_than_queries_or_fewer() -> None:
    rows = [make_row(i, n, 4, 4, 16, torch.float32) for i, n in enumerate([50, 3, 200, 1])]
    assert_exact(rows, [1, 2, 40, 1], causal=False)
    short = Row(make_row(7, 90, 4, 4, 16, torch.float32).q, rows[0].k, rows[0].v)
    assert_exact([short], [90], causal=False)
    assert_exact([short], [90], causal=False, bias=table(4, 129, 64))
    # Query i stands at i: from 50 + 7 on, the window holds no key.
    (got,) = run([short], [90], causal=False, window=Window(7, 7))
    want = dense(short, 90, causal=False, window=Window(7, 7))
    torch.testing.assert_close(got[:57].double(), want[:57], rtol=1e-5, atol=1e-5)
    assert torch.equal(got[57:], torch.zeros_like(got[57:]))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 200)), min_size=1, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([2, 8, 24]),
    block_size=st.sampled_from([1, 8, 13, 16]),
    left=st.one_of(st.none(), st.integers(0, 150)),
    softcap=st.one_of(st.none(), st.just(4.0)),
    biased=st.sampled_from(["", "distance", "position"]),
)
def test_any_shape_equals_dense(
    shape: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    left: int | None,
    softcap: float | None,
    biased: str,
) -> None:
    heads = kv_heads * group
    bias = {"": None, "distance": table(heads, 50, 40), "position": by_position(heads, 120)}[biased]
    rows = [make_row(i, n + before, heads, kv_heads, head_dim, torch.float32) for i, (n, before) in enumerate(shape)]
    assert_exact(
        rows,
        [n for n, _ in shape],
        kv=paged(rows, block_size),
        window=None if left is None else Window(left),
        softcap=softcap,
        bias=bias,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_its_own_rounding(dtype: torch.dtype) -> None:
    rows, query_lens = mixed(6, 2, 64, dtype)
    rows = [Row(row.q * 4, row.k, row.v) for row in rows]  # peaked scores, which rounding would spoil
    for row, n, got in zip(rows, query_lens, run(rows, query_lens), strict=True):
        want = dense(row, n)
        spacing = torch.finfo(dtype).eps * want.abs().clamp_min(1e-3)
        assert bool(((got.double() - want).abs() <= 0.51 * spacing + 1e-5).all())


# --- the same to the bit -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 16), (9, 3, 64), (4, 1, 8), (2, 2, 8)])
def test_alone_equals_in_a_crowd_to_the_bit(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    rows, query_lens = mixed(heads, kv_heads, head_dim, dtype)
    biases = [{"bias": bias} for bias in (table(heads, 65, 60), by_position(heads, 280))]
    for how in ({}, {"window": Window(50)}, {"window": Chunks(50)}, *biases, {"softcap": 3.0}):
        together = run(rows, query_lens, **how)
        for row, n, crowd in zip(rows, query_lens, together, strict=True):
            (alone,) = run([row], [n], paged([row], seed=5), **how)
            assert torch.equal(alone, crowd)
        reverse = run(rows[::-1], query_lens[::-1], **how)[::-1]
        assert all(map(torch.equal, together, reverse))


def test_a_crowd_of_several_groups_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, query_lens = mixed(6, 2, 16)
    want = run(rows, query_lens)
    monkeypatch.setattr("engine.backends.torch.attention_tiles.GROUP_BYTES", 1)
    assert all(map(torch.equal, want, run(rows, query_lens)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "how",
    [{}, {"window": Window(70)}, {"bias": table(6, 300, 290), "softcap": 4.0}, {"bias": by_position(6, 303)}],
    ids=["plain", "window", "bias by distance+softcap", "bias by position"],
)
@pytest.mark.parametrize("cuts", [[100, 200, 300], [7, 9, 40, 41 + 7, 300], [64, 299, 301], [2, 150]], ids=label)
def test_chunked_prompt_equals_whole_prompt_to_the_bit(
    cuts: list[int], how: dict[str, Any], dtype: torch.dtype
) -> None:
    length = 303
    row = make_row(3, length, 6, 2, 16, dtype)
    others, other_lens = mixed(6, 2, 16, dtype)
    (whole,) = run([row], [length], **how)
    begin = 0
    for end in [*cuts, length]:
        seen = Row(row.q[:end], row.k[:end], row.v[:end])
        (part,) = run([seen], [end - begin], **how)
        crowd = run([*others, seen], [*other_lens, end - begin], **how)[-1]
        assert end - begin > 1, "a single query is a tile of its own"
        assert torch.equal(part, whole[begin:end])
        assert torch.equal(crowd, whole[begin:end])
        begin = end


def fours_of_rows_sum_alike(fold: int, head_dim: int) -> bool:
    """Whether this machine's matrix product gives a row the same bits among few rows and among many."""
    few, many, head_dim = -(-fold // 4) * 4, fold * 32, -(-head_dim // 4) * 4
    for inner, columns in (shape for keys in SIZES for shape in ((head_dim, keys), (keys, head_dim))):
        a, b = torch.randn(1, many, inner), torch.randn(1, columns, inner)
        for right in (b.transpose(1, 2), b.transpose(1, 2).contiguous()):
            if not torch.equal(torch.bmm(a[:, :few].contiguous(), right), torch.bmm(a, right)[:, :few]):
                return False
    return True


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(3, 3, 64), (9, 3, 64), (5, 1, 32), (6, 1, 16), (4, 4, 6), (2, 1, 10)]
)
def test_decoded_token_equals_the_same_token_of_a_prompt(heads: int, kv_heads: int, head_dim: int) -> None:
    row = make_row(3, 140, heads, kv_heads, head_dim, torch.float32)
    (whole,) = run([row], [140])
    same = fours_of_rows_sum_alike(heads // kv_heads, head_dim)
    for end in (1, 2, 31, 32, 33, 128, 129, 140):
        (last,) = run([Row(row.q[:end], row.k[:end], row.v[:end])], [1])
        torch.testing.assert_close(last, whole[end - 1 : end], rtol=1e-6, atol=1e-6)
        assert torch.equal(last, whole[end - 1 : end]) or not same


# --- what must not leak ------------------------------------------------------------------------


@pytest.mark.parametrize("context", [20, 50, 300])
def test_beams_that_read_as_one_row_equal_beams_apart(context: int) -> None:
    if not fours_of_rows_sum_alike(1, 64):
        pytest.skip("this CPU sums few rows in another order")
    row = make_row(0, context, 3, 3, 64, torch.float32)
    (together,) = run([row], [5], causal=False)
    alone = [run([Row(row.q[i : i + 1], row.k, row.v)], [1], causal=False)[0] for i in range(5)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("how", [{}, {"window": Window(20)}, {"causal": False}], ids=label)
def test_stale_pages_do_not_leak(poison: float, how: dict[str, Any]) -> None:
    rows, query_lens = mixed(6, 2, 16)
    clean = run(rows, query_lens, paged(rows, poison=0.0), **how)
    stale = run(rows, query_lens, paged(rows, poison=poison), **how)
    assert all(map(torch.equal, clean, stale))
    assert all(bool(out.isfinite().all()) for out in clean)


def test_table_entries_past_the_context_and_before_the_window_are_not_read() -> None:
    rows, _ = mixed(6, 2, 16)
    kv = paged(rows)
    tables = torch.full_like(kv.block_tables, 2**31 - 1)
    for r, row in enumerate(rows):
        used = slice((len(row.k) - 11) // 16 if len(row.k) > 11 else 0, -(-len(row.k) // 16))
        tables[r, used] = kv.block_tables[r, used]
    ones = [1] * len(rows)
    want = run(rows, ones, kv, window=Window(10))
    got = run(rows, ones, Paged(kv.keys, kv.values, tables), window=Window(10))
    assert all(map(torch.equal, want, got))


@pytest.mark.parametrize("pages", [True, False], ids=["paged", "ragged"])
def test_a_row_of_nan_harms_only_itself(pages: bool) -> None:
    rows, query_lens = mixed(6, 2, 16)
    if not pages:
        query_lens = [len(row.q) for row in rows]
    layout = paged if pages else ragged
    clean = run(rows, query_lens, layout(rows), causal=pages)
    for sick in (1, 4):
        broken = list(rows)
        nan = torch.full_like(rows[sick].k, math.nan)
        broken[sick] = Row(rows[sick].q * math.nan, nan, nan)
        got = run(broken, query_lens, layout(broken), causal=pages)
        assert bool(got[sick].isnan().all())
        assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(clean, got, strict=True)) if i != sick)


def test_padding_tokens_give_zeros_and_change_nothing() -> None:
    rows, query_lens = mixed(6, 2, 16)
    q = torch.cat([row.q[len(row.q) - n :] for row, n in zip(rows, query_lens, strict=True)])
    metadata = AttentionMetadata.build(query_lens, [len(row.k) for row in rows], CPU)
    kv = paged(rows)
    want = BACKEND.attend(q, kv, metadata, scale=0.25)
    surplus = torch.full((5, 6, 16), math.nan)
    got = BACKEND.attend(torch.cat([q, surplus]), kv, metadata, scale=0.25)
    assert torch.equal(got[: len(q)], want)
    assert torch.equal(got[len(q) :], torch.zeros(5, 6, 16))


def test_queries_without_keys_give_zeros() -> None:
    metadata = AttentionMetadata.build([3, 0, 1], [0, 4, 2], CPU)
    row = make_row(0, 6, 4, 2, 8, torch.float32)
    kv = Ragged(row.k, row.v, torch.tensor([0, 0, 4], dtype=torch.int32))
    out = BACKEND.attend(row.q[:4], kv, metadata, causal=False, scale=1.0)
    want = dense(Row(row.q[3:4], row.k[4:], row.v[4:]), 1, causal=False, scale=1.0)
    assert torch.equal(out[:3], torch.zeros(3, 4, 8))
    torch.testing.assert_close(out[3:].double(), want, rtol=1e-5, atol=1e-5)
    nothing = AttentionMetadata.build([], [], CPU)
    assert BACKEND.attend(row.q[:0], kv, nothing, scale=1.0).shape == (0, 4, 8)


def test_keys_that_no_window_reaches_are_never_read() -> None:
    """The far past may be NaN: a sliding window skips its chunks instead of weighing them by 0."""
    row = make_row(1, 600, 4, 2, 16, torch.float32)
    for n in (1, 20):
        want = dense(row, n, window=Window(30))
        past = Row(row.q, row.k.clone(), row.v.clone())
        past.k[: 600 - n - 30] = math.nan
        past.v[: 600 - n - 30] = math.nan
        (got,) = run([past], [n], window=Window(30))
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


# --- the work of one step is shared --------------------------------------------------------------


def test_layers_share_the_index_work_and_do_not_confuse_it() -> None:
    rows, query_lens = mixed(6, 2, 16)
    q = torch.cat([row.q[len(row.q) - n :] for row, n in zip(rows, query_lens, strict=True)])
    metadata = AttentionMetadata.build(query_lens, [len(row.k) for row in rows], CPU)
    first, second = paged(rows, seed=1), paged(rows, seed=2)
    layers = [first, Paged(first.keys * 2, first.values * 2, first.block_tables)]
    for kv in layers:
        BACKEND.attend(q, kv, metadata, scale=0.25)
    assert len(metadata.cache) == 1
    windowed = BACKEND.attend(q, first, metadata, scale=0.25, window=Window(9))
    full = BACKEND.attend(q, first, metadata, scale=0.25)
    other_pages = BACKEND.attend(q, second, metadata, scale=0.25)
    assert len(metadata.cache) == 3
    assert not torch.equal(windowed, full)
    assert torch.equal(other_pages, full)


def test_one_strided_query_projection_needs_no_copy() -> None:
    row = make_row(0, 20, 4, 4, 16, torch.float32)
    joined = torch.stack([row.q, row.k, row.v], 1)
    kv = Ragged(joined[:, 1], joined[:, 2], torch.zeros(1, dtype=torch.int32))
    got = BACKEND.attend(
        joined[:, 0], kv, AttentionMetadata.build([20], [20], CPU), causal=False, scale=row.q.shape[-1] ** -0.5
    )
    torch.testing.assert_close(got.double(), dense(row, 20, causal=False), rtol=1e-5, atol=1e-5)


def planned(query_lens: list[int], context_lens: list[int], window: Window | None = None) -> tuple[Group, ...]:
    rows = [make_row(i, n, 1, 1, 2, torch.float32) for i, n in enumerate(context_lens)]
    metadata = AttentionMetadata.build(query_lens, context_lens, CPU)
    return plan(metadata, paged(rows), Shape(1, 1, 2, True, window))


def test_short_contexts_do_not_pay_for_long_ones() -> None:
    short, middle, long = planned([1] * 6, [20, 700, 130, 128, 1, 64])
    assert [step.tiles for step in long.steps] == [3, 2, 1, 1, 1, 1]
    assert [(group.keys, [step.tiles for step in group.steps]) for group in (short, middle)] == [(32, [2]), (64, [1])]


def test_windows_skip_the_chunks_that_they_do_not_touch() -> None:
    (group,) = planned([1, 1, 1], [2000, 80, 1025], Window(100))
    assert [step.tiles for step in group.steps] == [3, 2]
    (group,) = planned([200], [2000], Window(100))
    assert [step.tiles for step in group.steps] == [7, 7]


def test_short_rows_without_positions_have_small_tiles() -> None:
    lens = [1, 2, 4, 5, 16, 17, 70]
    rows = [make_row(i, 10, 1, 1, 2, torch.float32) for i in range(len(lens))]
    metadata = AttentionMetadata.build(lens, [10] * len(lens), CPU)
    groups = plan(metadata, paged(rows), Shape(1, 1, 2, False, None))
    assert [(group.width, group.tiles) for group in groups] == [(1, 1), (4, 2), (8, 1), (16, 1), (32, 4)]


def test_tiles_are_cut_at_absolute_positions() -> None:
    first, second = planned([60], [100])
    positions = torch.cat([group.queries.view(group.tiles, group.width) for group in (first, second)]) + 40
    spans = [(tile.min().item(), tile.max().item()) for tile in positions]
    assert spans == [(40, 63), (64, 95), (96, 99)]
    assert sorted(torch.cat((first.tokens, second.tokens)).tolist()) == list(range(60))


# --- what is refused -----------------------------------------------------------------------------


def contradicted(backend: AttentionBackend) -> Callable[..., None]:
    """Calls that each backend refuses with the figures; gives the function that makes them."""
    row = make_row(0, 20, 4, 2, 8, torch.float32)
    kv = paged([row])

    def attend(queries: list[int], context: list[int], q: Tensor = row.q, **how: Any) -> None:
        backend.attend(q, kv, AttentionMetadata.build(queries, context, CPU), scale=1.0, **how)

    with pytest.raises(ValueError, match="row 0 has 20 causal queries but a context of 19"):
        attend([20], [19])
    with pytest.raises(ValueError, match="contexts up to 49 tokens do not fit"):
        attend([20], [49])
    with pytest.raises(ValueError, match="q has 20 tokens, the rows have 21 queries"):
        attend([21], [21])
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads"):
        attend([20], [20], row.q[:, :3])
    with pytest.raises(ValueError, match="the bias has 3 heads, the queries have 4"):
        attend([20], [20], bias=table(3, 5, 2))
    return attend


def test_contradictions_are_refused_with_the_figures() -> None:
    attend = contradicted(BACKEND)
    with pytest.raises(ValueError, match="2 rows with contexts up to 5 tokens do not fit"):
        attend([1, 1], [5, 5], make_row(0, 2, 4, 2, 8, torch.float32).q)
    with pytest.raises(ValueError, match="the bias has 3 heads, the queries have 4"):
        attend([20], [20], bias=by_position(3, 20))


@dataclass
class Part:
    """Stands in for a model's attention part."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    causal: bool = True
    window: Window | None = None
    softcap: float | None = None
    content_bias: bool = False
    query_bias: bool = False


def test_select_logs_its_choice_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.backends.attention.selection.BACKENDS", (TorchReference,))
    with caplog.at_level(logging.DEBUG, logger="octavo.attention"):
        backend = select("cpu", [Part(), Part(window=Window(5))])
        rows, query_lens = mixed(6, 2, 16)
        metadata = AttentionMetadata.build(query_lens, [len(row.k) for row in rows], CPU)
        backend.attend(
            torch.cat([r.q[:n] for r, n in zip(rows, query_lens, strict=True)]), paged(rows), metadata, scale=1
        )
    assert isinstance(backend, TorchReference)
    assert [record.getMessage() for record in caplog.records] == ["Attention backend on cpu: torch"]


def test_select_refuses_a_device_with_reasons() -> None:
    with pytest.raises(ConfigError, match="torch attention runs on cpu and cuda; the device is mps"):
        select("mps", [Part(), Part()])
