"""A model that ranks divide: the parts of its spec, and the parts of its weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.families import FAMILY_SHAPES
from support.family_shape import build_reference
from torch import Size, Tensor

from engine.backends.torch.attention import TorchReference
from engine.model import families, spec
from engine.model.divided import Absent, divide
from engine.model.sharding import ABSENT, Cut, Share, cuts, refusals, shard
from engine.model.table import (
    Affine,
    Flattened,
    Interleaved,
    Joined,
    Reshaped,
    Same,
    Sparse,
    Stacked,
    Transform,
    Transposed,
    Turned,
)
from engine.model.transformer import Transformer


def spec_of(name: str) -> spec.ModelSpec:
    return families.build_spec(build_reference(FAMILY_SHAPES[name]).config)


@pytest.mark.parametrize(
    ("size", "unit", "count", "ranges"),
    [(12, 1, 3, [(0, 4), (4, 8), (8, 12)]), (7, 1, 2, [(0, 3), (3, 7)]), (96, 32, 2, [(0, 32), (32, 96)])],
)
def test_shares_cover_all(size: int, unit: int, count: int, ranges: list[tuple[int, int]]) -> None:
    assert [Share(rank, count).of(size, unit) for rank in range(count)] == ranges


FORMS: dict[str, tuple[Transform, Size, Cut]] = {
    "rows": (Same(), Size((8, 3)), Cut(0, (8,), ((2, 5),))),
    "columns": (Same(), Size((3, 8)), Cut(1, (8,), ((2, 5),))),
    "heads in one tensor": (Same(), Size((8, 3)), Cut(0, (4, 2, 2), ((2, 4), (0, 1), (1, 2)))),
    "joined": (Joined((4, 2, 2)), Size((8, 3)), Cut(0, (4, 2, 2), ((2, 4), (0, 1), (1, 2)))),
    "joined and scaled": (
        Joined((4, 4), (Affine(2.0), Affine(0.5, 1.0))), Size((8, 3)), Cut(0, (4, 4), ((1, 3), (1, 3)))
    ),
    "scaled and joined": (Affine(3.0, inner=Joined((4, 4))), Size((8, 3)), Cut(0, (4, 4), ((1, 3), (1, 3)))),
    "transposed": (Transposed(), Size((8, 3)), Cut(0, (8,), ((2, 5),))),
    "interleaved": (Interleaved(2, 2, 1), Size((8, 3)), Cut(0, (4, 2, 2), ((2, 4), (1, 2), (1, 2)))),
    "without keys": (Sparse((4, 4, 4), (0, 2)), Size((12,)), Cut(0, (4, 4, 4), ((1, 3),) * 3)),
    "experts": (Stacked(Joined((4, 4)), 2), Size((2, 8, 3)), Cut(1, (4, 4), ((1, 3), (1, 3)))),
    "experts' columns": (Stacked(Same(), 2), Size((2, 3, 8)), Cut(2, (8,), ((2, 5),))),
    "turned experts": (Turned(), Size((2, 8, 3)), Cut(1, (4, 4), ((1, 3), (0, 2)))),
    "flat experts": (Flattened(parts=2), Size((2, 8, 3)), Cut(1, (4, 4), ((1, 3), (1, 3)))),
    "vectors of heads": (Reshaped(((2,), (2,), (2,))), Size((6,)), Cut(0, (6,), ((2, 6),))),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_part_of_a_parameter_is_that_part_of_the_whole(name: str) -> None:
    """Whatever the form in which a checkpoint stores it."""
    form, size, cut = FORMS[name]
    sources = [torch.randn(shape) for shape in form.shapes(size)]
    whole = _filled(form, size, sources)
    begins = [sum(cut.sizes[:number]) for number in range(len(cut.sizes))]
    ranges = zip(begins, cut.ranges, strict=True)
    wanted = [whole.narrow(cut.axis, start + begin, end - begin) for start, (begin, end) in ranges]
    expected = torch.cat(wanted, dim=cut.axis)
    own = divide(form, cut)
    assert own.shapes(expected.shape) == form.shapes(size)
    assert torch.equal(_filled(own, expected.shape, sources), expected)


def _filled(form: Transform, size: Size, sources: list[Tensor]) -> Tensor:
    target = torch.full(size, torch.nan)
    for place, source in enumerate(sources):
        form.fill(target, place, source)
    return target


def test_absent_biases_are_zeros() -> None:
    target = torch.ones(3)
    Absent(Same()).fill(target, 0, torch.randn(3))
    assert not target.any()


# Their parameters have every kind of cut: grouped heads, gated and plain networks, experts, biases, norms of heads.
DIVIDED = ["llama", "gpt2", "bloom", "falcon-grouped", "qwen2-moe", "gpt-oss", "phi-norms-per-head", "deepseek-v3"]


@pytest.mark.parametrize(("name", "count"), [*((name, 2) for name in DIVIDED), *((name, 4) for name in DIVIDED[:-1])])
def test_the_cuts_are_the_shapes_of_the_smaller_model(name: str, count: int) -> None:
    """Every parameter of a rank is a part of the whole model's, and matrices of layers are all divided."""
    model = spec_of(name)
    whole = dict(Transformer(model, TorchReference(), 16, device="meta").named_parameters())
    for rank in range(count):
        share = Share(rank, count)
        found, own = cuts(model, share), Transformer(shard(model, share), TorchReference(), 16, device="meta")
        for target, parameter in own.named_parameters():
            cut = found.get(target)
            size = list(parameter.shape)
            if isinstance(cut, Cut):
                assert size[cut.axis] == sum(cut.own_sizes)
                size[cut.axis] = sum(cut.sizes)
            assert size == list(whole[target].shape), target
            divided = isinstance(cut, Cut) and sum(cut.own_sizes) < sum(cut.sizes)
            is_matrix = ".inner." in target and target.endswith(".weight") and parameter.dim() > 1
            whole_on_all = any(word in target for word in ("router", "opening", "latent"))
            assert divided or not is_matrix or whole_on_all, target
        sums = [target for target in found if target.endswith((".out.bias", ".down.bias"))]
        assert all(found[target] == ABSENT for target in sums)
        assert (not sums) == (rank == 0)


def test_every_head_has_one_rank() -> None:
    """Of grouped heads, ranks have whole groups; of fewer KV heads than ranks, several ranks have the same."""
    block = spec_of("llama").decoder.blocks[0]  # type: ignore[union-attr]
    for heads, kv_heads, count, own in [
        (6, 3, 2, [(2, 1), (4, 2)]),
        (8, 2, 4, [(2, 1)] * 4),
        (4, 1, 2, [(2, 1)] * 2),
        (4, 4, 3, [(1, 1), (1, 1), (2, 2)]),
    ]:
        part = replace(block.attention, heads=heads, kv_heads=kv_heads)
        model = spec_of("llama")
        assert model.decoder is not None
        model = replace(model, decoder=replace(model.decoder, blocks=(replace(block, attention=part),)))
        assert not refusals(model, count)
        shares = [shard(model, Share(rank, count)).decoder for rank in range(count)]
        made = [stack.blocks[0].attention for stack in shares if stack is not None]
        assert [(each.heads, each.kv_heads) for each in made] == own


@pytest.mark.parametrize(
    ("name", "count", "reason"),
    [
        ("llama", 3, "4 heads with 2 K/V heads"),
        ("deepseek-v3-ungrouped-halves-biases", 2, "3 heads with 1 K/V heads"),
        ("qwen3-next", 2, "layers with a state"),
        ("olmo2", 2, "norms over all heads at once"),
    ],
)
def test_models_that_cannot_be_divided(name: str, count: int, reason: str) -> None:
    assert any(reason in found for found in refusals(spec_of(name), count))
