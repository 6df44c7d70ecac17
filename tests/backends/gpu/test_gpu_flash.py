"""Long prompts that come whole, by torch's flash attention: which rows it is given, what comes of them, and when our
kernels compute them after all. Without a GPU a stand-in computes what it would, in float32."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from support.attention import CPU, assert_close, attend, moved, poisoned, stored
from support.driving import Job, Tokens, add, finish, make_engine, run, tokens_of
from support.families import FAMILY_SHAPES, make_family_checkpoint
from support.gpu import kernels
from support.jobs import CHECKPOINT, greedy, prompt
from test_attention_reference import Row, by_position, make_row, paged
from torch import Tensor

from engine import Engine, EngineConfig, inspection
from engine.backends.attention.base import AttentionMetadata, Paged, Ragged, Window
from engine.backends.attention.formats import FP8
from engine.backends.torch.attention import TorchReference
from engine.backends.triton import attention_flash
from engine.backends.triton.attention import TritonAttention
from engine.backends.triton.attention_flash import FEWEST, FlashPrompts, HeadShape, obstacle
from engine.execution import prompt_graphs, whole_prompts
from engine.execution.whole_prompts import find_difference, use_flash
from engine.model.checkpoint import read_config
from engine.model.families import build_spec

HALF = torch.float16  # the interpreter multiplies no bfloat16
SHAPE = HeadShape(4, 2, 16, HALF)


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[torch.device]:
    with kernels() as found:
        yield found


class Flash:
    """torch's operator, or what stands in for it; remembers the lengths of the prompts that it was given."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.real = attention_flash.operator()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.calls.append(len(q))
        assert len(q) == len(k) == len(v)
        assert {x.dtype for x in (q, k, v)} <= {torch.float16, torch.bfloat16}
        assert {x.stride(-1) for x in (q, k, v)} == {1}
        return self.compute(q, k, v, scale)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.real(q, k, v, scale) if q.is_cuda else by_reference(q, k, v, scale)


def by_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> Tensor:
    metadata = AttentionMetadata.build([len(q)], [len(q)], CPU)
    kv = Ragged(k.cpu().float(), v.cpu().float(), torch.zeros(1, dtype=torch.int32))
    return TorchReference().attend(q.cpu().float(), kv, metadata, scale=scale, causal=causal).to(q.device, q.dtype)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Flash:
    stand_in = Flash()
    monkeypatch.setattr(attention_flash, "operator", lambda: stand_in)
    return stand_in


def make_step(sizes: list[tuple[int, int]], shape: HeadShape = SHAPE) -> tuple[Tensor, Paged]:
    """Queries and pages of rows of (queries, context)."""
    numbered = enumerate(sizes)
    rows = [
        make_row(i, context, shape.heads, shape.kv_heads, shape.head_dim, shape.dtype) for i, (_, context) in numbered
    ]
    q = torch.cat([row.q[context - n :] for row, (n, context) in zip(rows, sizes, strict=True)])
    return q, paged([Row(row.q, row.k, row.v) for row in rows])


def with_flash(
    device: torch.device, q: Tensor, kv: Paged, sizes: list[tuple[int, int]], fewest: int = 20, **how: Any
) -> Tensor:
    """Attention where prompts from `fewest` tokens on are torch's to compute."""
    lengths, contexts = map(list, zip(*sizes, strict=True))
    metadata = AttentionMetadata.build(lengths, contexts, device)
    backend = TritonAttention(FlashPrompts((HeadShape.of(q, kv),), fewest))
    how = {name: moved(value, device) for name, value in how.items()}
    with poisoned():
        return backend.attend(moved(q, device), moved(kv, device), metadata, scale=0.25, **how).cpu()


# ------------------------------------------------------------------ which rows


def runs(sizes: list[tuple[int, int]], **bounds: int) -> list[tuple[bool, list[int]]]:
    lengths, contexts = map(list, zip(*sizes, strict=True))
    metadata = replace(AttentionMetadata.build(lengths, contexts, CPU), **bounds)
    found = FlashPrompts((), fewest=20).runs(metadata)
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for one in found:
        assert (one.tokens.start, one.tokens.stop) == (starts[one.rows.start], starts[one.rows.stop])
        assert one.metadata.query_lens == lengths[one.rows]
        assert one.metadata.context_lens == contexts[one.rows]
        assert one.metadata.query_start.tolist() == [0, *torch.tensor(lengths[one.rows]).cumsum(0).tolist()]
    assert FlashPrompts((), fewest=20).runs(metadata) is found or not found, "layers share them"
    return [(one.whole, list(range(one.rows.start, one.rows.stop))) for one in found]


def test_rows_whose_whole_context_is_in_the_step() -> None:
    assert runs([(1, 30), (30, 30), (20, 20)]) == [(False, [0]), (True, [1, 2])]
    assert runs([(25, 25), (25, 26), (0, 0), (40, 40), (1, 1)]) == [
        (True, [0]), (False, [1, 2]), (True, [3]), (False, [4]),
    ]  # fmt: skip
    assert runs([(30, 30)]) == [(True, [0])]
    for none in ([(1, 30), (30, 60)], [(19, 19)] * 5, [(0, 0)], [(1, 40)]):  # short ones are none, however many
        assert runs(none) == []


def test_rows_that_only_the_device_knows_are_none() -> None:
    assert runs([(30, 30)], max_context=100) == []
    assert runs([(30, 30)], max_queries=64) == []


def test_a_recorded_step_holds_no_prompt_that_is_long_enough() -> None:
    assert prompt_graphs.LARGEST + 1 == FEWEST


# ------------------------------------------------------------------ what comes of them


MIXED = [(1, 40), (1, 7), (30, 70), (25, 25), (20, 20), (3, 50), (41, 41), (19, 19), (1, 1)]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (4, 2, 24), (6, 1, 8)])
def test_whole_prompts_beside_other_rows(
    device: torch.device, flash: Flash, heads: int, kv_heads: int, head_dim: int
) -> None:
    """All are right, those of ours to the bit what they are without torch's; no page is read that a row does not own,
    and tokens past the rows are zeros."""
    q, kv = make_step(MIXED, HeadShape(heads, kv_heads, head_dim, HALF))
    lengths, contexts = map(list, zip(*MIXED, strict=True))
    ours = assert_close(device, q, kv, lengths, contexts, scale=0.25)
    got = with_flash(device, torch.cat([q, torch.full_like(q[:3], math.nan)]), kv, MIXED)
    assert flash.calls == [25, 20, 41]
    assert not got[len(q) :].any()
    sizes = TorchReference().attend(
        q.float(), replace(kv, values=kv.values.abs()), AttentionMetadata.build(lengths, contexts, CPU), scale=0.25
    )
    bound = 2 * torch.finfo(HALF).eps * (ours.abs() + sizes)
    assert bool(((got[: len(q)].float() - ours.float()).abs() <= bound).all())
    for number, (theirs, own) in enumerate(zip(got[: len(q)].split(lengths), ours.split(lengths), strict=True)):
        assert torch.equal(theirs, own) or number in (3, 4, 6)


def test_a_prompt_alone_equals_the_same_in_a_crowd_to_the_bit(device: torch.device, flash: Flash) -> None:
    q, kv = make_step(MIXED)
    lengths = [n for n, _ in MIXED]
    crowd = with_flash(device, q, kv, MIXED).split(lengths)
    for row in (3, 4, 6):
        own = replace(kv, block_tables=kv.block_tables[row : row + 1])
        assert torch.equal(with_flash(device, q.split(lengths)[row], own, MIXED[row : row + 1]), crowd[row])
    assert flash.calls[3:] == [25, 20, 41]


def test_queries_need_not_lie_side_by_side(device: torch.device, flash: Flash) -> None:
    q, kv = make_step([(30, 30)])
    wide = torch.stack([q, torch.full_like(q, math.nan)], -1)[..., 0]
    assert wide.stride(2) == 2
    assert torch.equal(with_flash(device, wide, kv, [(30, 30)]), with_flash(device, q, kv, [(30, 30)]))
    assert len(flash.calls) == 2


def test_contexts_that_fit_no_table_are_refused(device: torch.device, flash: Flash) -> None:
    q, kv = make_step([(30, 30)])
    with pytest.raises(ValueError, match="do not fit"):
        with_flash(device, q, replace(kv, block_tables=kv.block_tables[:, :1]), [(30, 30)])
    assert not flash.calls


# ------------------------------------------------------------------ what stays with our kernels


OTHERS: dict[str, dict[str, Any]] = {
    "a window": {"window": Window(9)},
    "a bias": {"bias": by_position(4, 40)},
    "a soft cap": {"softcap": 5.0},
    "sinks": {"sinks": torch.linspace(-1, 2, 4)},
    "queries see later keys": {"causal": False},
}


@pytest.mark.parametrize("why", OTHERS)
def test_other_attention_is_computed_by_our_kernels(device: torch.device, flash: Flash, why: str) -> None:
    how = OTHERS[why]
    q, kv = make_step([(30, 30), (1, 40)])
    got = with_flash(device, q, kv, [(30, 30), (1, 40)], **how)
    assert torch.equal(got, attend(device, q, kv, [30, 1], [30, 40], scale=0.25, **how))
    assert not flash.calls
    assert why in obstacle(HALF, 16, HALF, **(how | ({"sinks": True} if "sinks" in how else {})))


@pytest.mark.parametrize("pages", [torch.int8, FP8, torch.float32])
def test_pages_in_another_format_are_read_by_our_kernels(
    device: torch.device, flash: Flash, pages: torch.dtype
) -> None:
    """They hold rounded keys and values, which a prompt in chunks meets."""
    q, kv = make_step([(30, 30)])
    rounded = stored(kv, pages)
    got = with_flash(device, q, rounded, [(30, 30)])
    assert torch.equal(got, attend(device, q, rounded, [30], [30], scale=0.25))
    assert not flash.calls
    assert "the model computes in float16" in obstacle(HALF, 16, pages)


def test_other_formats_and_heads_are_our_kernels(device: torch.device, flash: Flash) -> None:
    for head_dim, dtype, why in ((16, torch.float32, "compute in float32"), (20, HALF, "20 features")):
        q, kv = make_step([(30, 30)], HeadShape(4, 2, head_dim, dtype))
        got = with_flash(device, q, kv, [(30, 30)])
        assert torch.equal(got, attend(device, q, kv, [30], [30], scale=0.25))
        assert why in obstacle(dtype, head_dim, dtype)
    assert "264 features" in obstacle(HALF, 264, HALF)
    assert not flash.calls
    for head_dim, dtype in ((8, HALF), (256, torch.bfloat16), (80, HALF)):
        assert obstacle(dtype, head_dim, dtype) == ""


def test_heads_that_were_not_checked_are_our_kernels(device: torch.device, flash: Flash) -> None:
    q, kv = make_step([(30, 30)])
    backend = TritonAttention(FlashPrompts((replace(SHAPE, heads=8),), fewest=20))
    metadata = AttentionMetadata.build([30], [30], device)
    got = backend.attend(moved(q, device), moved(kv, device), metadata, scale=0.25)
    assert torch.equal(got.cpu(), attend(device, q, kv, [30], [30], scale=0.25))
    assert not flash.calls


# ------------------------------------------------------------------ the check at start


def found(device: torch.device, lengths: tuple[int, ...] = (70, 33)) -> str:
    with mock.patch.object(whole_prompts, "_LENGTHS", lengths):
        return find_difference(SHAPE, 0.25, 16, device)


@pytest.mark.parametrize("lengths", [(70, 33), pytest.param(whole_prompts._LENGTHS, marks=pytest.mark.slow)])
def test_what_computes_the_same_is_taken(device: torch.device, flash: Flash, lengths: tuple[int, int]) -> None:
    assert found(device, lengths) == ""
    first, second = lengths
    assert flash.calls == [first, second, first, second]


class Later(Flash):
    """Lets queries see later keys."""

    def compute(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return by_reference(q, k, v, scale, causal=False)


class OtherScale(Flash):
    def compute(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return super().compute(q, k, v, 1.2 * scale)


class OtherHeads(Flash):
    """Head h reads key head h % kv_heads."""

    def compute(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        order = torch.tensor([0, 2, 1, 3], device=q.device)
        return super().compute(q[:, order].contiguous(), k, v, scale)[:, order]


class OneNan(Flash):
    def compute(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = super().compute(q, k, v, scale)
        out[-1, -1, -1] = math.nan
        return out


@pytest.mark.parametrize("wrong", [Later, OtherScale, OtherHeads, OneNan])
def test_what_computes_something_else_is_not_taken(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, wrong: type[Flash]
) -> None:
    made = wrong()
    monkeypatch.setattr(attention_flash, "operator", lambda: made)
    assert "4 heads of 16 features over 2 differ from ours" in found(device)
    assert made.calls


class Unsteady(Flash):
    """The last bit is another one from the third call on."""

    def compute(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = super().compute(q, k, v, scale)
        if len(self.calls) > 2:
            out[-1, -1, -1] *= 1 + torch.finfo(out.dtype).eps
        return out


def test_what_differs_from_call_to_call_is_not_taken(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Unsteady()
    monkeypatch.setattr(attention_flash, "operator", lambda: made)
    assert "depend on what is computed beside a prompt" in found(device)


def test_what_fails_is_not_taken(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(attention_flash, "operator", lambda: fail)
    assert "it fails for 4 heads of 16 features over 2 (no kernel for this)" in found(device)


# ------------------------------------------------------------------ engines


SETTINGS: dict[str, Any] = {
    "dtype": "float16",
    "max_model_len": 96,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "flash_prefill": True,
}
# One that comes whole, one that is too short, and one whose first 25 tokens come, as nothing stands before them.
JOBS = [Job(prompt(1, 30), greedy(4)), Job(prompt(2, 9), greedy(4)), Job(prompt(4, 60), greedy(3))]
LATER = Job(prompt(3, 22), greedy(3))  # comes whole beside the others' tokens, and the rest of that one


def answers(engine: Engine) -> list[Tokens]:
    for number, job in enumerate(JOBS):
        add(engine, str(number), job)
    outputs = finish(engine, lambda number: None if number else add(engine, "3", LATER))
    return [tokens_of(outputs[str(number)]) for number in range(4)]


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 20 tokens are long."""
    monkeypatch.setattr(attention_flash, "FEWEST", 20)
    monkeypatch.setattr(whole_prompts, "_LENGTHS", (33, 20))


@pytest.mark.slow
@pytest.mark.usefixtures("shorter")
def test_an_engine_gives_the_same_tokens(
    device: torch.device, flash: Flash, checkpoint: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(CHECKPOINT).path
    plain = make_engine(path, **(SETTINGS | {"device": str(device), "flash_prefill": False}))
    expected = answers(plain)
    plain.close()
    assert not flash.calls
    with caplog.at_level(logging.INFO, logger="octavo.execution"):
        engine = make_engine(path, **(SETTINGS | {"device": str(device)}))
    layers = len(engine.runner.model.decoder.blocks)
    assert f"whole prompts of at least 20 tokens use torch's flash attention in {layers} layers" in caplog.text
    flash.calls.clear()
    assert answers(engine) == expected
    assert flash.calls == [30, 25] * layers + [22] * layers
    flash.calls.clear()
    assert run(engine, [JOBS[0]]) == expected[:1], "behind a cached beginning"
    assert not flash.calls
    engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("shorter")
def test_layers_with_windows_stay_with_our_kernels(
    device: torch.device, flash: Flash, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    make_family_checkpoint(FAMILY_SHAPES["gemma3"], tmp_path)
    jobs = [Job([5 + number % 40 for number in range(30)], greedy(1))]
    plain = make_engine(tmp_path, **(SETTINGS | {"device": str(device), "flash_prefill": False}))
    expected = run(plain, jobs)
    plain.close()
    with caplog.at_level(logging.INFO, logger="octavo.execution"):
        engine = make_engine(tmp_path, **(SETTINGS | {"device": str(device)}))
    assert "Octavo's kernels in" in caplog.text
    assert "(attention has a window)" in caplog.text
    flash.calls.clear()
    assert run(engine, jobs) == expected
    plain_layers = [one for one in engine.runner.model.spec.decoder.attentions if one.window is None]
    assert flash.calls == [30] * len(plain_layers)
    assert 0 < len(plain_layers) < len(engine.runner.model.decoder.blocks)
    engine.close()


@pytest.mark.slow
@pytest.mark.usefixtures("shorter")
def test_a_model_for_which_it_is_not_is_told_why(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, checkpoint: Callable[[str], Any], caplog: Any
) -> None:
    made = Later()
    monkeypatch.setattr(attention_flash, "operator", lambda: made)
    engine = make_engine(checkpoint(CHECKPOINT).path, **(SETTINGS | {"device": str(device), "flash_prefill": False}))
    expected = run(engine, JOBS[:1])
    model = engine.runner.model
    backend = model.decoder.blocks[0].attention.inner.backend
    assert backend.flash is None
    for pages, max_tokens, why in (
        (torch.int8, 64, "pages hold int8, the model computes in float16"),
        (HALF, 19, "it is for prompts of at least 20 tokens, but --max-num-batched-tokens is 19"),
        (HALF, 64, "differ from ours"),
    ):
        caplog.clear()
        use_flash(model, backend, pages, 16, max_tokens)
        (said,) = (one for one in caplog.records if one.levelno == logging.WARNING)
        assert said.getMessage().startswith("torch's flash attention is not used, Octavo's kernels are: ")
        assert why in said.getMessage()
        assert bool(made.calls) == (why == "differ from ours"), "no trial, and no kernel compiled, where none is needed"
    made.calls.clear()
    assert run(engine, [Job(prompt(7, 30), greedy(1)), JOBS[0]])[1:] == expected
    assert not made.calls
    engine.close()


@pytest.mark.usefixtures("shorter")
def test_it_is_tried_without_weights(device: torch.device, flash: Flash, checkpoint: Callable[[str], Any]) -> None:
    """As `octavo doctor` does, whether it is asked for or not."""
    path = checkpoint(CHECKPOINT).path
    config = EngineConfig(model=str(path), device=str(device), dtype="float16", max_num_batched_tokens=20)
    facts, layers = inspection.inspect_flash(config, path), len(build_spec(read_config(path)).trunk.blocks)
    assert (facts.layers, facts.of, facts.why, facts.too_short) == (layers, layers, "", "")
    assert flash.calls == [33, 20, 33, 20], "once for all layers"
    narrow = inspection.inspect_flash(replace(config, max_num_batched_tokens=19, max_num_seqs=4), path)
    assert "--max-num-batched-tokens is 19" in narrow.too_short
    pages = inspection.inspect_flash(replace(config, kv_cache_dtype="int8"), path)
    assert (pages.layers, pages.why) == (0, "pages hold int8, the model computes in float16")


def test_another_backend_says_that_it_computes(
    checkpoint: Callable[[str], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.backends.triton._interpreting", False)
    with caplog.at_level(logging.WARNING, logger="octavo.execution"):
        engine = make_engine(checkpoint(CHECKPOINT).path, flash_prefill=True)
    assert "torch's flash attention is not used, Octavo's kernels are: attention is computed by the " in caplog.text
    engine.close()
