"""Attention by the native library: against the reference, and the promises that it makes to the bit."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import stored
from support.native import ISAS, each_isa, kernels_of, needs_native
from test_attention_content import content
from test_attention_reference import CPU, Part, Row, by_position, contradicted, dense, make_row, paged, ragged, table
from torch import Tensor

from engine.backends import native
from engine.backends.attention.base import AttentionMetadata, Chunks, ContentBias, Paged, Ragged, Window
from engine.backends.attention.selection import select
from engine.backends.native.attention import NativeAttention
from engine.backends.torch.attention import TorchReference

pytestmark = needs_native
FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


def batch(rows: list[Row], query_lens: list[int], causal: bool, dtype: torch.dtype) -> tuple[Tensor, AttentionMetadata]:
    parts = [
        row.q[len(row.k) - n : len(row.k)] if causal else row.q[:n] for row, n in zip(rows, query_lens, strict=True)
    ]
    metadata = AttentionMetadata.build(query_lens, [len(row.k) for row in rows], CPU)
    return torch.cat(parts).to(dtype), metadata


def sums_of_sizes(q: Tensor, kv: Paged | Ragged, metadata: AttentionMetadata, **how: Any) -> Tensor:
    """What weights and sizes of values add up to: errors of weights are in proportion to it."""
    return TorchReference().attend(q.float(), replace(kv, values=kv.values.abs()), metadata, **how)


def assert_close(q: Tensor, kv: Paged | Ragged, metadata: AttentionMetadata, **how: Any) -> Tensor:
    """The native result, which has to be the reference's but for what its formats round.

    Sums in float32 may differ by some units of their last place. A result is rounded to the queries' format. Where both
    sides are multiplied as bfloat16, each weight is rounded to that (2^-8), and so is what all are divided by.
    """
    got = NativeAttention().attend(q, kv, metadata, **how)
    want = TorchReference().attend(q.float(), kv, metadata, **how)
    sizes = sums_of_sizes(q, kv, metadata, **how)
    bound = 1e-5 + 3e-5 * sizes
    if q.dtype != torch.float32:
        bound = bound + torch.finfo(q.dtype).eps / 2 * want.abs() + torch.finfo(q.dtype).smallest_normal
    if q.dtype == torch.bfloat16 and kv.keys.dtype in (torch.bfloat16, torch.int8):
        bound = bound + 2**-7 * sizes
    assert got.dtype == q.dtype
    assert got.shape == q.shape
    assert bool(((got.float() - want).abs() <= bound).all())
    return got


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Row], list[int], Paged | Ragged, bool, dict[str, Any], torch.dtype]:
    causal, cached = draw(st.booleans()), draw(st.booleans())
    kv_heads, group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(1, 70))
    heads, block_size = kv_heads * group, draw(st.sampled_from([1, 4, 13, 16, 32]))
    shape = draw(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 300)), min_size=1, max_size=5))
    sizes = [(n if causal else min(n, before + 1), n + before if causal else before + 1) for n, before in shape]
    sizes = [(n, max(context, 1)) for n, context in sizes]
    rows = [
        make_row(i, max(n, context), heads, kv_heads, head_dim, torch.float32) for i, (n, context) in enumerate(sizes)
    ]
    rows = [Row(row.q, row.k[:context], row.v[:context]) for row, (_, context) in zip(rows, sizes, strict=True)]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    kv: Paged | Ragged
    if cached:
        kv = stored(paged(rows, block_size), draw(st.sampled_from(FORMATS)), centred=draw(st.booleans()))
    else:
        laid = ragged(rows)
        kv = replace(laid, keys=laid.keys.to(dtype), values=laid.values.to(dtype))
    right = 0 if causal else draw(st.integers(0, 150))
    how = {
        "causal": causal,
        "window": draw(
            st.one_of(
                st.none(), st.integers(0, 200).map(lambda left: Window(left, right)), st.integers(1, 200).map(Chunks)
            )
        ),
        "scale": head_dim**-0.5,
        "softcap": draw(st.one_of(st.none(), st.floats(1, 50))),
        "bias": draw(st.sampled_from([None, table(heads, 50, 40), table(heads, 700, 350), by_position(heads, 120)])),
        "sinks": draw(st.sampled_from([None, torch.linspace(-3, 9, heads)])),
    }
    return rows, [n for n, _ in sizes], kv, causal, how, dtype


@each_isa
@settings(max_examples=25, deadline=None)
@given(problem=problems(), threads=st.integers(1, 2), surplus=st.integers(0, 3))
def test_any_batch_equals_the_reference(isa: str, problem: Any, threads: int, surplus: int) -> None:
    rows, query_lens, kv, causal, how, dtype = problem
    q, metadata = batch(rows, query_lens, causal, dtype)
    q = torch.cat([q, torch.full((surplus, *q.shape[1:]), math.nan, dtype=dtype)])
    with kernels_of(isa, threads):
        got = assert_close(q, kv, metadata, **how)
    assert not got[len(q) - surplus :].any()


@each_isa
@pytest.mark.parametrize("head_dim", [8, 80, 96, 128, 192, 256])
def test_sizes_of_heads_that_models_have(isa: str, head_dim: int) -> None:
    rows = [make_row(i, n, 4, 2, head_dim, torch.float32) for i, n in enumerate((1, 200, 40))]
    for dtype in (torch.float32, torch.bfloat16):
        q, metadata = batch(rows, [1, 1, 40], True, dtype)
        with kernels_of(isa):
            assert_close(q, stored(paged(rows), dtype), metadata, scale=head_dim**-0.5)


@each_isa
def test_more_heads_share_keys_than_a_tile_has_queries(isa: str) -> None:
    rows = [make_row(i, n, 130, 1, 16, torch.float32) for i, n in enumerate((3, 140))]
    q, metadata = batch(rows, [3, 2], True, torch.float32)
    with kernels_of(isa):
        assert_close(q, paged(rows), metadata, scale=0.25)


@each_isa
def test_projections_and_tables_need_not_lie_side_by_side(isa: str) -> None:
    row = make_row(0, 150, 4, 4, 24, torch.float32)
    joined = torch.stack([row.q, row.k, row.v], 1)
    metadata = AttentionMetadata.build([150], [150], CPU)
    starts = torch.zeros(1, dtype=torch.int32)
    with kernels_of(isa):
        how = {"causal": False, "scale": 0.2}
        got = NativeAttention().attend(joined[:, 0], Ragged(joined[:, 1], joined[:, 2], starts), metadata, **how)
        want = NativeAttention().attend(row.q, Ragged(row.k, row.v, starts), metadata, **how)
        assert torch.equal(got, want)
        kv = paged([row])
        wide = torch.full((1, 2 * kv.block_tables.shape[1]), 2**31 - 1, dtype=torch.int32)
        wide[:, ::2] = kv.block_tables
        got = NativeAttention().attend(row.q, replace(kv, block_tables=wide[:, ::2]), metadata, scale=0.2)
        assert torch.equal(got, NativeAttention().attend(row.q, kv, metadata, scale=0.2))


# --- every number of every format ----------------------------------------------------------------


def alone(q: Tensor, kv: Paged) -> Tensor:
    """Each row sees one key: its result is the value."""
    ones = [1] * len(q)
    return NativeAttention().attend(q, kv, AttentionMetadata.build(ones, ones, CPU), scale=1.0)


@each_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_a_16_bit_page_is_read_as_it_is(isa: str, dtype: torch.dtype) -> None:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(1024, 1, 1, 64)
    tables = torch.arange(1024, dtype=torch.int32)[:, None]
    kv = Paged(torch.zeros_like(values), values, tables)
    with kernels_of(isa):
        got = alone(torch.zeros(1024, 1, 64), kv)
    assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), values.view(1024, 1, 64).float().nan_to_num(7.0, 8.0, 9.0))


@each_isa
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_to_even(isa: str, dtype: torch.dtype) -> None:
    """The neighbours of each float32 that is half way between two numbers of the format, and it itself."""
    exact = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    exact = exact[exact.isfinite()]
    between = (exact + torch.cat([exact[1:], exact[:1]])) / 2
    around = torch.stack(
        [between, between.nextafter(torch.tensor(math.inf)), between.nextafter(torch.tensor(-math.inf))]
    )
    values = torch.nn.functional.pad(around.flatten(), (0, -around.numel() % 64)).view(-1, 1, 1, 64)
    values = values.masked_fill(values.abs() < 2.0**-126, 0.0)
    tables = torch.arange(len(values), dtype=torch.int32)[:, None]
    with kernels_of(isa):
        got = alone(torch.zeros(len(values), 1, 64, dtype=dtype), Paged(torch.zeros_like(values), values, tables))
    assert torch.equal(got, values.view(-1, 1, 64).to(dtype))


@each_isa
def test_weights_fall_to_nothing_without_a_step(isa: str) -> None:
    """Two keys whose scores lie further and further apart: weights to 1e-6 and a score's rounding, in the end 0."""
    gaps = torch.cat([torch.linspace(0, 90, 400), torch.tensor([200.0, 1e30])])
    keys = torch.stack([torch.zeros_like(gaps), -gaps], 1).view(-1, 2, 1, 1)
    values = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(keys.shape).contiguous()
    tables = torch.arange(len(gaps), dtype=torch.int32)[:, None]
    metadata = AttentionMetadata.build([1] * len(gaps), [2] * len(gaps), CPU)
    with kernels_of(isa):
        got = NativeAttention().attend(torch.ones(len(gaps), 1, 1), Paged(keys, values, tables), metadata, scale=1.0)
    want = 1 / (1 + gaps.double().exp())
    error = (got.flatten().double() / want - 1).abs()
    assert (error[:380] <= 1e-6 + 2**-24 * gaps[:380]).all()
    assert not got[-2:].any()


@each_isa
def test_a_cap_is_as_exact_near_0_as_far_from_it(isa: str) -> None:
    rows = [make_row(i, 200, 2, 1, 16, torch.float32) for i in range(3)]
    for scale, cap in ((1e-3, 0.5), (0.25, 1.0), (0.25, 50.0), (30.0, 20.0)):
        q, metadata = batch(rows, [1, 30, 200], True, torch.float32)
        with kernels_of(isa):
            got = NativeAttention().attend(q, paged(rows), metadata, scale=scale, softcap=cap)
        want = torch.cat([dense(r, n, scale=scale, softcap=cap) for r, n in zip(rows, (1, 30, 200), strict=True)])
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


# --- the same to the bit -------------------------------------------------------------------------

PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.float16, torch.float16),
]
each_format = pytest.mark.parametrize(("dtype", "pages"), PAIRS, ids=lambda kind: str(kind).removeprefix("torch."))


@each_isa
@each_format
@settings(max_examples=8, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 299), max_size=6),
    heads=st.sampled_from([(9, 3), (4, 4), (5, 1)]),
    head_dim=st.sampled_from([16, 24, 64]),
    how=st.sampled_from(
        [
            {},
            {"window": Window(70)},
            {"window": Chunks(70)},
            {"softcap": 4.0},
            {"sinks": "each"},
            {"bias": "distance"},
            {"bias": "position", "window": Window(9)},
        ]
    ),
    seed=st.integers(0, 99),
)
@pytest.mark.slow
def test_chunks_crowds_and_threads_change_no_bit(
    isa: str,
    dtype: torch.dtype,
    pages: torch.dtype,
    cuts: list[int],
    heads: tuple[int, int],
    head_dim: int,
    how: dict[str, Any],
    seed: int,
) -> None:
    """A prompt in chunks of any size, one token among them, among others, by one thread or two; or whole, alone."""
    how = dict(how, scale=head_dim**-0.5)
    if "sinks" in how:
        how["sinks"] = torch.linspace(-2, 8, heads[0])
    if "bias" in how:
        how["bias"] = {"distance": table(heads[0], 65, 60), "position": by_position(heads[0], 280)}[how["bias"]]
    row = make_row(seed, 300, *heads, head_dim, torch.float32)
    others = [make_row(100 + i, n, *heads, head_dim, torch.float32) for i, n in enumerate((1, 170, 33))]
    with kernels_of(isa, 1):
        q, metadata = batch([row], [300], True, dtype)
        whole = NativeAttention().attend(q, stored(paged([row]), pages), metadata, **how)
    begin = 0
    for end in [*sorted(set(cuts)), 300]:
        seen = Row(row.q[:end], row.k[:end], row.v[:end])
        kv = stored(paged([*others, seen], seed=end), pages)
        for threads in (1, 2):
            q, metadata = batch([*others, seen], [1, 1, 33, end - begin], True, dtype)
            with kernels_of(isa, threads):
                got = NativeAttention().attend(q, kv, metadata, **how)
            assert torch.equal(got[35:], whole[begin:end])
        begin = end


@each_isa
@each_format
@settings(max_examples=12, deadline=None)
@given(
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    head_dim=st.one_of(st.integers(1, 70), st.sampled_from([80, 96, 128, 160, 256])),
    contexts=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    queries=st.integers(1, 9),
    block_size=st.sampled_from([1, 5, 13, 16, 32]),
    threads=st.integers(1, 4),
    centred=st.booleans(),
    how=st.sampled_from(
        [
            {},
            {"window": Window(70)},
            {"window": Chunks(70)},
            {"softcap": 4.0},
            {"sinks": "each"},
            {"bias": "distance"},
            {"bias": "position", "window": Window(9)},
        ]
    ),
)
@pytest.mark.slow
def test_few_queries_get_the_bits_of_many(
    isa: str,
    dtype: torch.dtype,
    pages: torch.dtype,
    group: int,
    kv_heads: int,
    head_dim: int,
    contexts: list[int],
    queries: int,
    block_size: int,
    threads: int,
    centred: bool,
    how: dict[str, Any],
) -> None:
    """Few queries meet keys where they lie, many meet packed ones; which of them it is changes no bit."""
    how = dict(how, scale=head_dim**-0.5)
    heads = kv_heads * group
    if "sinks" in how:
        how["sinks"] = torch.linspace(-2, 8, group * kv_heads)
    if "bias" in how:
        how["bias"] = {"distance": table(heads, 65, 60), "position": by_position(heads, 280)}[how["bias"]]
    rows = [make_row(i, n, heads, kv_heads, head_dim, torch.float32) for i, n in enumerate(contexts)]
    kv = stored(paged(rows, block_size), pages, centred)
    q, metadata = batch(rows, contexts, True, dtype)
    with kernels_of(isa):
        whole = NativeAttention().attend(q, kv, metadata, **how)
    query_lens = [min(queries, n) for n in contexts]
    q, metadata = batch(rows, query_lens, True, dtype)
    with kernels_of(isa, threads):
        got = assert_close(q, kv, metadata, **how)
    ends = itertools.accumulate(contexts)
    assert torch.equal(got, torch.cat([whole[end - n : end] for n, end in zip(query_lens, ends, strict=True)]))


@each_isa
@each_format
@pytest.mark.parametrize("shape", [(1, 3000), (40, 1500), (2, 700)])
def test_threads_that_share_a_row_change_no_bit(
    isa: str, dtype: torch.dtype, pages: torch.dtype, shape: tuple[int, int]
) -> None:
    if isa not in ISAS:
        pytest.skip("the emulator has one thread")
    queries, context = shape
    row = make_row(1, context, 4, 1, 128, torch.float32)
    q, metadata = batch([row], [queries], True, dtype)
    kv = stored(paged([row]), pages)
    results = []
    for threads in (1, 2, 3):
        with kernels_of(isa, threads):
            backend = NativeAttention()
            results.append(backend.attend(q, kv, metadata, scale=0.09))
            _, shared, finished = backend._memory.tensors
            # Threads have met in this memory, and left it as they found it.
            assert threads == 1 or bool((shared.view(torch.int32) != -1).any())
            assert not finished.any()
            again = backend.attend(q, kv, metadata, scale=0.09)
            assert torch.equal(again, results[0])
        metadata.cache.clear()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@each_isa
@pytest.mark.parametrize("how", [{"causal": False}, {}, {"window": Window(700)}], ids=str)
@pytest.mark.parametrize(("dtype", "pages"), [(torch.float32, torch.float32), (torch.bfloat16, torch.int8)])
def test_large_tiles_change_no_bit(
    isa: str, dtype: torch.dtype, pages: torch.dtype, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles grow with the number of queries and with the core's cache, and threads share them."""
    causal = how.get("causal", True)
    row = make_row(1, 1200, 6, 3, 40, torch.float32)
    kv = stored(paged([row]), pages)
    tiles = []

    def attend(queries: int) -> Tensor:
        q, metadata = batch([row], [queries], causal, dtype)
        result = NativeAttention().attend(q, kv, metadata, scale=0.16, **how)
        (prepared,) = metadata.cache.values()
        tiles.append(prepared.call.tile)
        return result

    with kernels_of(isa, 1):
        few = attend(70)
    for cache, threads in itertools.product((0, 1 << 18, 4 << 20), (1, 2, 3)):
        monkeypatch.setattr("engine.backends.native.attention.core_cache", lambda cache=cache: cache)
        with kernels_of(isa, threads):
            many = attend(1200)
        assert torch.equal(many[-70:] if causal else many[:70], few)
    assert tiles[0] == 96
    assert tiles[1] == 384
    assert tiles[-3] == 768
    assert 96 < tiles[-1] <= 300  # eight for each thread


@each_isa
def test_beams_that_read_as_one_row_equal_beams_apart(isa: str) -> None:
    row = make_row(0, 300, 3, 3, 64, torch.float32)
    with kernels_of(isa):
        q, metadata = batch([row], [5], False, torch.float32)
        together = NativeAttention().attend(q, paged([row]), metadata, causal=False, scale=0.125)
        for i in range(5):
            metadata = AttentionMetadata.build([1], [300], CPU)
            apart = NativeAttention().attend(q[i : i + 1], paged([row]), metadata, causal=False, scale=0.125)
            assert torch.equal(apart, together[i : i + 1])


# --- what must not leak --------------------------------------------------------------------------


@each_isa
@each_format
@pytest.mark.parametrize("how", [{}, {"window": Window(20)}, {"causal": False}], ids=str)
def test_stale_pages_do_not_leak(isa: str, dtype: torch.dtype, pages: torch.dtype, how: dict[str, Any]) -> None:
    rows = [make_row(i, n, 6, 2, 24, torch.float32) for i, n in enumerate((1, 300, 33, 129, 64))]
    query_lens = [1, 1, 33, 40, 2]
    q, metadata = batch(rows, query_lens, how.get("causal", True), dtype)
    results = []
    for poison in (0.0, math.nan, 3e4):
        kv = stored(paged(rows, poison=poison), pages)
        if math.isnan(poison) and kv.key_scales is not None:
            assert bool(kv.key_scales.isnan().any())
        tables = torch.full_like(kv.block_tables, 2**31 - 1)
        for r, (row, n) in enumerate(zip(rows, query_lens, strict=True)):
            first = max(len(row.k) - n - 20, 0) // 16 if "window" in how else 0
            used = slice(first, -(-len(row.k) // 16))
            tables[r, used] = kv.block_tables[r, used]
        with kernels_of(isa):
            results.append(NativeAttention().attend(q, replace(kv, block_tables=tables), metadata, scale=0.2, **how))
        metadata.cache.clear()
    assert bool(results[0].isfinite().all())
    assert all(torch.equal(results[0], other) for other in results[1:])


@each_isa
@each_format
def test_keys_that_no_window_reaches_are_never_read(isa: str, dtype: torch.dtype, pages: torch.dtype) -> None:
    row = make_row(1, 600, 4, 2, 16, torch.float32)
    for n in (1, 20):
        past = Row(row.q, row.k.clone(), row.v.clone())
        past.k[: 600 - n - 30] = math.nan
        past.v[: 600 - n - 30] = math.nan
        q, metadata = batch([row], [n], True, dtype)
        with kernels_of(isa):
            results = [
                NativeAttention().attend(q, stored(paged([r]), pages), metadata, scale=0.25, window=Window(30))
                for r in (row, past)
            ]
        assert torch.equal(*results)


@each_isa
@each_format
def test_a_row_of_nan_harms_only_itself(isa: str, dtype: torch.dtype, pages: torch.dtype) -> None:
    rows = [make_row(i, n, 6, 2, 24, torch.float32) for i, n in enumerate((40, 300, 33))]
    q, metadata = batch(rows, [1, 30, 33], True, dtype)
    sick = Row(rows[1].q, rows[1].k * math.nan, rows[1].v * math.nan)
    with kernels_of(isa, 2):
        clean, got = (
            NativeAttention().attend(q, stored(paged(some), pages), metadata, scale=0.2)
            for some in (rows, [rows[0], sick, rows[2]])
        )
    assert bool(got[1:31].isnan().all())
    assert torch.equal(got[:1], clean[:1])
    assert torch.equal(got[31:], clean[31:])


@each_isa
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_never_hidden(isa: str, value: float) -> None:
    """One number of one key or value, wherever it lies, reaches every query that sees it."""
    row = make_row(1, 150, 2, 2, 24, torch.float32)
    for place in (0, 100, 149):
        for part in ("k", "v"):
            broken = Row(row.q.abs(), row.k.clone(), row.v.clone())
            getattr(broken, part)[place, 0, 5] = value
            q, metadata = batch([broken], [1], True, torch.float32)
            with kernels_of(isa):
                got = NativeAttention().attend(q, paged([broken]), metadata, scale=0.2)
            assert not bool(got[0, 0].isfinite().all())
            assert bool(got[0, 1].isfinite().all())


@each_isa
def test_queries_without_keys_give_zeros(isa: str) -> None:
    row = make_row(0, 6, 4, 2, 8, torch.float32)
    kv = Ragged(row.k, row.v, torch.tensor([0, 0, 4], dtype=torch.int32))
    with kernels_of(isa, 2):
        metadata = AttentionMetadata.build([3, 0, 1], [0, 4, 2], CPU)
        out = NativeAttention().attend(row.q[:4], kv, metadata, causal=False, scale=1.0)
        want = dense(Row(row.q[3:4], row.k[4:], row.v[4:]), 1, causal=False, scale=1.0)
        assert not out[:3].any()
        torch.testing.assert_close(out[3:].double(), want, rtol=1e-5, atol=1e-5)
        nothing = AttentionMetadata.build([], [], CPU)
        assert NativeAttention().attend(row.q[:0], kv, nothing, scale=1.0).shape == (0, 4, 8)
        assert not NativeAttention().attend(row.q, kv, nothing, scale=1.0).any()
        # Query i stands at i: from 6 + 2 on, the window holds no key.
        long = make_row(1, 90, 4, 2, 8, torch.float32)
        metadata = AttentionMetadata.build([90], [6], CPU)
        kv = Ragged(row.k, row.v, torch.zeros(1, dtype=torch.int32))
        out = NativeAttention().attend(long.q, kv, metadata, causal=False, window=Window(2, 2), scale=1.0)
        assert not out[8:].any()
        assert bool(out[:8].any(-1).all())


# --- what is refused, what is chosen -------------------------------------------------------------


def test_contradictions_are_refused_with_the_figures() -> None:
    attend = contradicted(NativeAttention())
    with pytest.raises(ValueError, match=r"no kernel for queries of torch\.float64"):
        attend([20], [20], make_row(0, 20, 4, 2, 8, torch.float64).q)
    equal = make_row(0, 20, 2, 2, 8, torch.float32)
    terms = ContentBias(torch.zeros(2, 3, 8), None, torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="no kernel for a content bias over keys of int8"):
        NativeAttention().attend(
            equal.q, stored(paged([equal]), torch.int8), AttentionMetadata.build([20], [20], CPU), scale=1.0, bias=terms
        )


@each_isa
@pytest.mark.parametrize("terms", ["both", "keys", "queries"])
@pytest.mark.parametrize(("head_dim", "reach"), [(5, 20), (64, 310)])
def test_terms_of_contents_and_distances(isa: str, terms: str, head_dim: int, reach: int) -> None:
    """Of rows of many lengths, by every format; alone they have the same bits."""
    lengths = [1, 5, 97, 17, 200, 128]
    rows = [make_row(i, n, 3, 3, head_dim, torch.float32) for i, n in enumerate(lengths)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bias = content(3, head_dim, reach=reach, terms=terms)
        keys, queries = (None if part is None else part.to(dtype) for part in (bias.keys, bias.queries))
        bias = ContentBias(keys, queries, bias.columns, bias.zero)
        q, metadata = batch(rows, lengths, False, dtype)
        laid = ragged(rows)
        kv = replace(laid, keys=laid.keys.to(dtype), values=laid.values.to(dtype))
        how: dict[str, Any] = {"causal": False, "scale": (3 * head_dim) ** -0.5, "bias": bias}
        with kernels_of(isa, 2):
            got = NativeAttention().attend(q, kv, metadata, **how)
            alone = [
                NativeAttention().attend(
                    part.q.to(dtype),
                    Ragged(part.k.to(dtype), part.v.to(dtype), torch.zeros(1, dtype=torch.int32)),
                    AttentionMetadata.build([n], [n], CPU),
                    **how,
                )
                for part, n in zip(rows, lengths, strict=True)
            ]
        assert torch.equal(got, torch.cat(alone))
        want = TorchReference().attend(q.float(), kv, AttentionMetadata.build(lengths, lengths, CPU), **how)
        bound = {torch.float32: 3e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
        assert float((got.float() - want).abs().max()) < bound


@each_isa
def test_terms_of_rows_over_pages(isa: str) -> None:
    rows = [make_row(i, n, 2, 2, 16, torch.float32) for i, n in enumerate((30, 150, 300))]
    q, metadata = batch(rows, [1, 7, 120], True, torch.float32)
    with kernels_of(isa, 2):
        for how in ({}, {"window": Window(50)}, {"softcap": 3.0}):
            assert_close(q, paged(rows, poison=math.nan), metadata, scale=0.2, bias=content(2, 16), **how)


@each_isa
def test_pages_that_do_not_exist_are_an_error_and_no_crash(isa: str) -> None:
    row = make_row(0, 300, 4, 2, 8, torch.float32)
    kv = paged([row])
    metadata = AttentionMetadata.build([1], [300], CPU)
    with kernels_of(isa, 2):
        backend = NativeAttention()
        want = backend.attend(row.q[-1:], kv, metadata, scale=1.0)
        for block in (-1, len(kv.keys), 2**31 - 1):
            broken = kv.block_tables.clone()
            broken[0, 9] = block
            with pytest.raises(IndexError, match=f"outside the {kv.keys.shape[0] * 16} slots"):
                backend.attend(row.q[-1:], replace(kv, block_tables=broken), metadata, scale=1.0)
        laid = Ragged(row.k, row.v, torch.tensor([1], dtype=torch.int32))
        with pytest.raises(IndexError, match="outside the 300 slots"):
            backend.attend(row.q[-1:], laid, metadata, scale=1.0)
        assert torch.equal(backend.attend(row.q[-1:], kv, metadata, scale=1.0), want)


def test_layers_share_what_a_step_prepares_and_do_not_confuse_it() -> None:
    row = make_row(0, 50, 6, 2, 16, torch.float32)
    metadata = AttentionMetadata.build([50], [50], CPU)
    first, second = paged([row], seed=1), paged([row], seed=2)
    backend = NativeAttention()
    one = backend.attend(row.q, first, metadata, scale=0.25)
    double = backend.attend(row.q, replace(first, values=first.values * 2), metadata, scale=0.25)
    assert len(metadata.cache) == 1
    windowed = backend.attend(row.q, first, metadata, scale=0.25, window=Window(9))
    biased = backend.attend(row.q, first, metadata, scale=0.25, bias=by_position(6, 40))
    other_pages = backend.attend(row.q, second, metadata, scale=0.25)
    assert len(metadata.cache) == 3
    assert torch.equal(double, one * 2)
    assert torch.equal(other_pages, one)
    assert not torch.equal(windowed, one)
    assert not torch.equal(biased, one)
    assert torch.equal(backend.attend(row.q, first, metadata, scale=0.25), one)


def test_the_library_is_chosen_where_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="octavo.attention"):
        assert isinstance(select("cpu", [Part()]), NativeAttention)
        with_bias = [Part(), Part(kv_heads=4, content_bias=True)]
        assert isinstance(select("cpu", with_bias), NativeAttention)
        assert isinstance(select("cpu", with_bias, torch.int8), TorchReference)
        with native.use(None):
            assert isinstance(select("cpu", [Part()], torch.int8), TorchReference)
    assert [record.getMessage() for record in caplog.records] == [
        "Attention backend on cpu: native",
        "Attention backend on cpu: native",
        "Attention backend on cpu: torch; not usable: native "
        "(native attention does not support a content bias over int8 pages)",
        "Attention backend on cpu: torch; not usable: native (there is no native library)",
    ]
    assert [record.levelname for record in caplog.records] == ["DEBUG", "DEBUG", "INFO", "INFO"]
    cuda = torch.device("cuda")
    assert NativeAttention.unsupported(Part(), cuda) == ["native attention runs on cpu; the device is cuda"]
    reasons = NativeAttention.unsupported(Part(), CPU, torch.float64)
    assert reasons == ["native attention does not read float64 pages"]
