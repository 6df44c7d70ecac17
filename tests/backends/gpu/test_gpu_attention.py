"""Attention by Triton's kernels: against the reference, and the promises that it makes to the bit."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from support.attention import assert_close, attend, stored
from support.gpu import kernels
from test_attention_reference import Part, Row, by_position, make_row, paged, ragged, table
from torch import Tensor

from engine.backends import triton as gpu
from engine.backends.attention.base import AttentionMetadata, ContentBias, Paged, Ragged, Window
from engine.backends.attention.formats import FORMATS, FP8
from engine.backends.attention.selection import select
from engine.backends.triton import attention as triton
from engine.backends.triton import attention_shapes as shapes
from engine.backends.triton.attention import TritonAttention

# The interpreter multiplies no bfloat16; a GPU has each shape compiled first.
QUERIES, EXAMPLES = [torch.float32, torch.float16], 20
if torch.cuda.is_available():
    QUERIES, EXAMPLES = [torch.float32, torch.bfloat16], 10


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[torch.device]:
    with kernels() as found:
        yield found


def queries(rows: list[Row], lengths: list[int], causal: bool = True) -> Tensor:
    """The last queries of each row if causal, else its first ones."""
    return torch.cat(
        [row.q[len(row.k) - n : len(row.k)] if causal else row.q[:n] for row, n in zip(rows, lengths, strict=True)]
    )


def make_rows(sizes: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[Row]:
    """Rows of (queries, context)."""
    rows = [make_row(i, max(n, context), heads, kv_heads, head_dim, dtype) for i, (n, context) in enumerate(sizes)]
    return [Row(row.q, row.k[:context], row.v[:context]) for row, (_, context) in zip(rows, sizes, strict=True)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[tuple[int, int]], Tensor, Paged | Ragged, dict[str, Any]]:
    causal, cached = draw(st.booleans()), draw(st.booleans())
    kv_heads, group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.sampled_from([8, 16, 24, 40]))
    heads, block_size = kv_heads * group, draw(st.sampled_from([1, 13, 16, 32]))
    shape = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 200)), min_size=1, max_size=4))
    shape += [(1, draw(st.integers(0, 300)))] * draw(st.integers(0, 1))
    sizes = [(n, n + before) if causal else (n, before) for n, before in shape]
    dtype = draw(st.sampled_from(QUERIES))
    rows = make_rows(sizes, heads, kv_heads, head_dim, dtype)
    kv: Paged | Ragged
    if cached:
        kv = stored(paged(rows, block_size), draw(st.sampled_from([dtype, *FORMATS])), centred=draw(st.booleans()))
    else:
        kv = ragged(rows)
    right = 0 if causal else draw(st.integers(0, 120))
    how = {
        "causal": causal,
        "window": draw(st.one_of(st.none(), st.integers(0, 150).map(lambda left: Window(left, right)))),
        "scale": head_dim**-0.5,
        "softcap": draw(st.one_of(st.none(), st.floats(1, 50))),
        "bias": draw(st.sampled_from([None, table(heads, 50, 40), table(heads, 700, 350), by_position(heads, 120)])),
        "sinks": draw(st.sampled_from([None, torch.linspace(-3, 9, heads)])),
    }
    return sizes, queries(rows, [n for n, _ in sizes], causal), kv, how


@settings(max_examples=EXAMPLES, deadline=None)
@given(problem=problems(), surplus=st.integers(0, 3))
@pytest.mark.slow
def test_any_batch_equals_the_reference(device: torch.device, problem: Any, surplus: int) -> None:
    sizes, q, kv, how = problem
    q = torch.cat([q, torch.full((surplus, *q.shape[1:]), math.nan, dtype=q.dtype)])
    got = assert_close(device, q, kv, [n for n, _ in sizes], [context for _, context in sizes], **how)
    assert not got[len(q) - surplus :].any()


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_sizes_of_heads_that_models_have(device: torch.device, head_dim: int) -> None:
    """A row of one query, one of a few, which are a kernel's work, and one of many, another's."""
    sizes = [(1, 70), (3, 20), (20, 40)]
    for dtype in QUERIES:
        rows = make_rows(sizes, 4, 2, head_dim, dtype)
        kv = paged(rows)
        assert_close(device, queries(rows, [1, 3, 20]), kv, [1, 3, 20], [70, 20, 40], scale=head_dim**-0.5)


def test_more_heads_share_keys_than_16(device: torch.device) -> None:
    sizes = [(3, 3), (1, 140), (2, 90)]
    rows = make_rows(sizes, 71, 1, 16, torch.float32)
    assert_close(device, queries(rows, [3, 1, 2]), paged(rows), [3, 1, 2], [3, 140, 90], scale=0.25)


def test_projections_and_tables_need_not_lie_side_by_side(device: torch.device) -> None:
    row = make_row(0, 90, 4, 4, 24, torch.float32)
    joined = torch.stack([row.q, row.k, row.v], 1)
    q, k, v = joined.unbind(1)
    kv = Ragged(k, v, torch.zeros(1, dtype=torch.int32))
    assert_close(device, q, kv, [90], [90], scale=0.2, causal=False)
    pages = paged([row])
    wide = torch.cat([pages.block_tables, torch.full((1, 9), 7, dtype=torch.int32)], 1)
    views = replace(pages, block_tables=wide[:, : pages.block_tables.shape[1]])
    assert_close(device, q[-1:], views, [1], [90], scale=0.2)


# ------------------------------------------------------------------ the same to the bit


CROWD = [(1, 300), (1, 30), (3, 130), (40, 170), (1, 620), (2, 2), (70, 70), (1, 1), (1, 210)]


@pytest.mark.parametrize("pages", [torch.float16, torch.int8, FP8])
@pytest.mark.parametrize(
    "how", [{}, {"window": Window(150), "softcap": 4.0, "bias": table(6, 65, 60)}], ids=["plain", "all"]
)
@pytest.mark.slow
def test_alone_equals_in_a_crowd_to_the_bit(
    device: torch.device, how: dict[str, Any], pages: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of a row that is alone are spread over programs and merged by the last of them; in a crowd, where there
    are fewer programs than rows, one program has them all."""
    monkeypatch.setattr(shapes, "CHUNK", 128 if how else 64)  # of two tiles, or one
    few = replace(triton._facts(device), multiprocessors=1)
    lengths, contexts = map(list, zip(*CROWD, strict=True))
    rows = make_rows(CROWD, 6, 2, 16, torch.float16)
    kv = stored(paged(rows), pages)
    q = queries(rows, lengths)
    with monkeypatch.context() as patch:
        patch.setattr(triton, "_facts", lambda _: few)
        crowd = assert_close(device, q, kv, lengths, contexts, scale=0.25, **how).split(lengths)
    monkeypatch.setattr(triton, "_facts", lambda _: replace(few, multiprocessors=21))
    for i, (row, together) in enumerate(zip(q.split(lengths), crowd, strict=True)):
        own = replace(kv, block_tables=kv.block_tables[i : i + 1])
        alone = attend(device, row, own, [lengths[i]], [contexts[i]], scale=0.25, **how)
        assert torch.equal(alone, together)


@pytest.mark.parametrize("most", [2, 32])
def test_however_many_programs_share_the_work_to_the_bit(
    device: torch.device, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows whose chunks have different sizes where they have no more than two; a share may lie within a chunk."""
    monkeypatch.setattr(shapes, "max_chunks", lambda kv_heads: most)
    sizes = [(1, 700), (3, 130), (20, 40), (1, 260), (0, 0), (1, 64)]
    lengths, contexts = map(list, zip(*sizes, strict=True))
    rows = make_rows(sizes, 4, 2, 16, torch.float32)
    kv, q = paged(rows), queries(rows, lengths)
    facts, results = triton._facts(device), []
    for programs in (1, 2, 3, 7, 60):
        monkeypatch.setattr(shapes, "decoders", lambda tiles, programs=programs: programs)
        monkeypatch.setattr(triton, "_facts", lambda _: replace(facts, multiprocessors=1))
        results.append(assert_close(device, q, kv, lengths, contexts, scale=0.25))
    for result in results[1:]:
        assert torch.equal(result, results[0])


def plan_for(device: torch.device, lengths: list[int], contexts: list[int], window: Window | None = None) -> Any:
    """What 264 programs do of a step of a model with 8 heads of keys."""
    large = triton._Device(capability=90, multiprocessors=132, hardware=True)
    tiles = shapes.decode_tiles(128, 4, 2, 90, paged=True)
    metadata = AttentionMetadata.build(lengths, contexts, device)
    return triton._plan_decode(metadata, triton._Shape(32, 8, tiles, tiles, True, window), 128, 1, 4, large)


def test_one_row_is_spread_over_many_programs(device: torch.device) -> None:
    """At a context of 1,000 tokens and 8 heads of keys, each chunk is a program's."""
    plan = plan_for(device, [1], [1000])
    assert plan.share.tolist() == [1, 8 * 8]
    assert plan.programs == 8 * 9  # one more a head, where the first key lies anywhere


@pytest.mark.parametrize(
    ("rows", "share"), [(1, 1), (8, 2), (30, 8), (33, 8), (34, 9), (40, 10), (48, 12), (60, 16), (100, 25)]
)
def test_no_program_reads_much_more_than_the_others(device: torch.device, rows: int, share: int) -> None:
    """A row has 8 chunks a head. From 34 rows on, some of 264 programs would have two whole heads, which is 16 chunks;
    they get these only where the others have nearly as much."""
    plan = plan_for(device, [1] * rows, [1000] * rows)
    assert plan.share.tolist() == [share, rows * 8 * 8]
    assert share <= 9 / 8 * math.ceil(rows * 8 * 8 / 264)


def test_whole_heads_are_of_no_use_where_rows_differ(device: torch.device) -> None:
    contexts = [2000] * 30 + [1900]
    assert plan_for(device, [1] * 31, contexts).share.tolist() == [15, 8 * (30 * 16 + 15)]
    assert plan_for(device, [1] * 31, [2000] * 31).share.tolist() == [16, 8 * 31 * 16]


def test_a_program_begins_where_the_one_before_it_ends(device: torch.device) -> None:
    """Among prompts, rows without a query, and rows whose chunks have grown."""
    lengths = [1, 700, 0, 4, 1, 5, 1]
    contexts = [20_000, 700, 300, 64, 65, 300, 2049]
    works = [8 * 160, 8, 8, 8 * 17]  # of 128 keys, in chunks of 640, 128, 128 and 128 keys
    plan = plan_for(device, lengths, contexts)
    assert plan.row_of[:4].tolist() == [0, 3, 4, 6]
    before = [sum(works[:row]) for row in range(5)]
    assert plan.before[:4].tolist() == before[:4]
    share, every = plan.share.tolist()
    assert every == before[4]
    used = math.ceil(every / share)
    assert plan.programs == 264 >= used
    for program, first in enumerate(plan.firsts[:used].tolist()):
        assert before[first] <= program * share < before[first + 1]
    assert not plan.counters.any()
    seen = plan_for(device, [1, 1], [20_000, 90], Window(99))  # from key 19,840 and key 0 on
    assert seen.share.tolist() == [1, 8 * (2 + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"window": Window(70)}], ids=["plain", "window"])
def test_chunked_prompt_equals_whole_prompt_to_the_bit(device: torch.device, how: dict[str, Any]) -> None:
    row = make_row(3, 200, 4, 2, 16, torch.float32)
    kv = paged([row])
    whole = attend(device, row.q, kv, [200], [200], scale=0.25, **how)
    for begin, end in ((0, 77), (77, 101), (101, 200)):
        part = attend(device, row.q[begin:end], kv, [end - begin], [end], scale=0.25, **how)
        assert torch.equal(part, whole[begin:end])


def test_a_bound_of_the_context_changes_no_bit(device: torch.device) -> None:
    """A graph is captured for the longest context; padded rows read one key of page 0."""
    contexts = [300, 1, 530, 1, 1]
    rows = make_rows([(1, n) for n in contexts], 4, 2, 16, torch.float32)
    kv = paged(rows)
    kv.keys[0] = kv.values[0] = 0.0
    kv.block_tables[3:] = 0
    q = queries(rows, [1] * 5)
    got = assert_close(device, q, kv, [1] * 5, contexts, scale=0.25, max_context=100_000)
    assert not got[3:].any()
    assert torch.equal(got[:3], attend(device, q[:3], kv, [1] * 3, contexts[:3], scale=0.25))


def test_lengths_are_read_from_the_device(device: torch.device) -> None:
    """As a replayed graph does: the host's lengths are those of the capture."""
    contexts = [3, 400, 77]
    rows = make_rows([(1, n) for n in contexts], 4, 2, 16, torch.float32)
    kv, q = paged(rows), queries(rows, [1] * 3)
    want = attend(device, q, kv, [1] * 3, contexts, scale=0.25)
    metadata = AttentionMetadata.build([1] * 3, [1] * 3, device)
    metadata.context.copy_(torch.tensor(contexts))
    moved_kv = replace(
        kv, keys=kv.keys.to(device), values=kv.values.to(device), block_tables=kv.block_tables.to(device)
    )
    got = TritonAttention().attend(q.to(device), moved_kv, replace(metadata, max_context=1000), scale=0.25)
    assert torch.equal(got.cpu(), want)


# ------------------------------------------------------------------ what must not leak


@pytest.mark.parametrize("pages", [torch.float32, torch.int8, FP8])
def test_keys_that_no_window_reaches_are_never_read(device: torch.device, pages: torch.dtype) -> None:
    rows = make_rows([(1, 150), (30, 150)], 4, 2, 16, torch.float32)
    kv = paged(rows)
    for r, first in ((0, 150 - 21), (1, 120 - 20)):  # pages before the first key that is seen
        gone = kv.block_tables[r, : first // 16].long()
        kv.keys[gone] = kv.values[gone] = math.nan
        kv.block_tables[r, : first // 16] = 0
    got = assert_close(
        device, queries(rows, [1, 30]), stored(kv, pages), [1, 30], [150, 150], scale=0.25, window=Window(20)
    )
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("pages", [torch.float32, torch.int8, FP8])
def test_a_row_of_nan_harms_only_itself(device: torch.device, pages: torch.dtype) -> None:
    sizes = [(1, 90), (25, 60), (1, 40)]
    rows = make_rows(sizes, 4, 2, 16, torch.float32)
    clean = attend(device, queries(rows, [1, 25, 1]), stored(paged(rows), pages), [1, 25, 1], [90, 60, 40], scale=0.25)
    rows[1].v[3, 0, 5] = math.nan
    rows[2].k[7, 1, 2] = math.inf
    sick = attend(device, queries(rows, [1, 25, 1]), stored(paged(rows), pages), [1, 25, 1], [90, 60, 40], scale=0.25)
    assert torch.equal(sick[0], clean[0])
    bad = slice(None) if pages != torch.float32 else 5
    assert bool(sick[1:26, :2, bad].isnan().all())
    assert torch.equal(sick[1:26, 2:], clean[1:26, 2:])
    assert torch.equal(sick[26, :2], clean[26, :2])
    assert bool(sick[26, 2:].isnan().any())


def test_queries_without_keys_give_zeros(device: torch.device) -> None:
    rows = make_rows([(2, 0), (90, 50), (40, 0)], 4, 2, 16, torch.float32)
    kv = paged([*rows, make_row(9, 3, 4, 2, 16, torch.float32)])
    q = queries(rows, [2, 90, 40], causal=False)
    got = assert_close(device, q, kv, [2, 90, 40], [0, 50, 0], scale=0.25, causal=False, window=Window(7, 7))
    assert not got[:2].any()
    assert not got[2 + 57 :].any()
    assert not attend(device, q[:0], kv, [], [], scale=0.25).numel()


# ------------------------------------------------------------------ the choice


def part(**how: Any) -> Part:
    return Part(**how)


def test_what_it_serves_and_why_not(device: torch.device) -> None:
    assert TritonAttention.unsupported(part(), device, torch.int8) == []
    assert type(select(device, [part()], FP8)) is TritonAttention
    reasons = [
        TritonAttention.unsupported(part(content_bias=True), device),
        TritonAttention.unsupported(part(query_bias=True), device),
        TritonAttention.unsupported(part(head_dim=512), device),
        TritonAttention.unsupported(part(heads=129, kv_heads=1), device),
        TritonAttention.unsupported(part(), device, torch.int16),
        TritonAttention.unsupported(part(), torch.device("mps")),
    ]
    words = [
        "does not support a content bias",
        "does not support a bias from queries",
        "256 features, not 512",
        "heads share keys, not 129",
        "does not read int16 pages",
        "is mps",
    ]
    for (reason,), word in zip(reasons, words, strict=True):
        assert word in reason


def test_heads_that_share_keys_fit_into_a_blocks_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(capability: int, heads: int, head_dim: int, dtype: torch.dtype) -> list[str]:
        facts = triton._Device(capability, multiprocessors=1, hardware=False)
        monkeypatch.setattr(triton, "_facts", lambda _: facts)
        return TritonAttention.unsupported(part(heads=heads, kv_heads=1, head_dim=head_dim), device, dtype)

    # Of the powers of two, the largest that the compiler fits in.
    fitting = {80: (64, 32, 128), 86: (16, 16, 32), 90: (128, 64, 128), 100: (64, 32, 128), 120: (16, 16, 32)}
    kinds = [(128, torch.float32), (256, torch.float32), (256, torch.bfloat16)]
    for capability, most in fitting.items():
        for (head_dim, dtype), heads in zip(kinds, most, strict=True):
            assert reasons(capability, heads, head_dim, dtype) == []
            (reason,) = reasons(capability, heads + 1, head_dim, dtype)
            assert f"up to {heads} heads share keys, not {heads + 1}" in reason


def test_a_cpu_is_never_served_outside_the_interpreter(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "_interpreting", False)
        (reason,) = TritonAttention.unsupported(part(), torch.device("cpu"))
        assert "the device is cpu" in reason
        with caplog.at_level(logging.INFO, logger="octavo.attention"):
            assert type(select("cpu", [part()], torch.float32)) is not TritonAttention
        assert "triton" not in caplog.text


def test_contradictions_are_refused_with_the_figures(device: torch.device) -> None:
    row = make_row(0, 20, 4, 2, 16, torch.float32)
    kv = paged([row])
    with pytest.raises(ValueError, match="20 causal queries but a context of 3"):
        attend(device, row.q, kv, [20], [3], scale=1.0)
    with pytest.raises(ValueError, match="only int8 and fp8 pages have scales"):
        attend(device, row.q, replace(stored(kv, torch.int8), key_scales=None), [20], [20], scale=1.0)
    with pytest.raises(ValueError, match=r"no kernel for queries of torch\.float64"):
        attend(device, row.q.double(), kv, [20], [20], scale=1.0)
    terms = ContentBias(torch.zeros(2, 3, 16), None, torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="does not support a content bias"):
        attend(device, row.q[:, :2], kv, [20], [20], scale=1.0, bias=terms)
