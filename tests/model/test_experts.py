"""Mixtures of experts: what a token gets, what it costs, and that no other token of the batch changes a bit of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeConfig, Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.phimoe.modeling_phimoe import PhimoeConfig, PhimoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from engine.execution.invariance import min_invariant_rows
from engine.model.activations import ACTIVATIONS
from engine.model.experts import ExpertMatrices, ExpertsFeedForward
from engine.model.layers import Linear
from engine.model.place import Place
from engine.model.spec import Clamped, Corrected, Dense, Experts, Gated, SparseMixer

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


def make(part: Experts, hidden: int, dtype: torch.dtype = torch.float32, *, packed: bool = False) -> ExpertsFeedForward:
    """Random experts with a router that is sharp, so that rounding changes no choice."""
    module = ExpertsFeedForward(part, hidden, Place(CPU, dtype))
    generator = torch.Generator().manual_seed(5)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    module.router.weight.mul_(4)
    if packed:
        for inner in module.modules():
            if isinstance(inner, Linear | ExpertMatrices):
                inner.pack()
    return module


@torch.inference_mode()
def run(module: ExpertsFeedForward, x: Tensor, *, padding: int = 0, min_rows: int = 1) -> Tensor:
    """Results of the tokens; padding rows hold values that would show."""
    rows = F.pad(x, (0, 0, 0, padding), value=3.0)
    out: Tensor = module(rows, len(x), min_rows)
    assert out.shape == rows.shape
    assert out.dtype == x.dtype
    assert not out[len(x) :].any()
    return out[: len(x)]


def inputs(tokens: int, hidden: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_by_one(module: ExpertsFeedForward, x: Tensor) -> Tensor:
    """The definition, token by token, in float64."""
    part = module.part
    activation = ACTIVATIONS[part.expert.activation]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, features in enumerate(x.double()):
        probabilities = (module.router.weight.double() @ features).softmax(0)
        best = sorted(range(part.count), key=lambda expert: -float(probabilities[expert]))[: part.active]
        total = float(probabilities[best].sum()) if part.normalize else 1.0
        for expert in best:
            inner = module.up.weight[expert].double() @ features
            if isinstance(part.expert, Gated):
                gate, up = inner.chunk(2)
                inner = activation(gate) * up
            else:
                inner = activation(inner)
            share = float(probabilities[expert]) / total
            out[token] += share * (module.down.weight[expert].double() @ inner)
    return out


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, 9),
    tokens=st.integers(1, 12),
    padding=st.integers(0, 3),
    min_rows=st.integers(1, 5),
    normalize=st.booleans(),
    expert=st.sampled_from([Gated(10, "silu"), Gated(7, "gelu"), Dense(9, "relu")]),
)
def test_equals_the_definition(
    data: st.DataObject, count: int, tokens: int, padding: int, min_rows: int, normalize: bool, expert: Dense | Gated
) -> None:
    part = Experts(expert, count, data.draw(st.integers(1, count)), normalize)
    module = make(part, 12)
    x = inputs(tokens, 12, seed=data.draw(st.integers(0, 99)))
    ours = run(module, x, padding=padding, min_rows=min_rows)
    torch.testing.assert_close(ours.double(), one_by_one(module, x), rtol=1e-4, atol=1e-5)


def mixtral() -> tuple[nn.Module, Experts]:
    config = MixtralConfig(hidden_size=24, intermediate_size=20, num_local_experts=6, num_experts_per_tok=2)
    return MixtralSparseMoeBlock(config), Experts(Gated(20, "silu"), 6, 2)


def qwen3(normalize: bool) -> tuple[nn.Module, Experts]:
    config = Qwen3MoeConfig(
        hidden_size=24, moe_intermediate_size=20, num_experts=10, num_experts_per_tok=4, norm_topk_prob=normalize
    )
    return Qwen3MoeSparseMoeBlock(config), Experts(Gated(20, "silu"), 10, 4, normalize)


@pytest.mark.parametrize("theirs", [mixtral(), qwen3(True), qwen3(False)], ids=["mixtral", "qwen3", "qwen3-plain"])
def test_equals_transformers(theirs: tuple[Any, Experts]) -> None:
    block, part = theirs
    module = make(part, 24)
    with torch.no_grad():
        block.gate.weight.copy_(module.router.weight)
        block.experts.gate_up_proj.copy_(module.up.weight)
        block.experts.down_proj.copy_(module.down.weight)
    x = inputs(17, 24)
    with torch.inference_mode():
        expected = block.eval()(x[None])[0]
    torch.testing.assert_close(run(module, x, padding=2, min_rows=3), expected, rtol=1e-5, atol=1e-6)


def glm(groups: int, kept: int, normalize: bool) -> tuple[nn.Module, Experts]:
    config = Glm4MoeConfig(
        hidden_size=24,
        n_routed_experts=12,
        num_experts_per_tok=4,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=normalize,
        routed_scaling_factor=1.7,
    )
    routing = Corrected(groups=groups, open_groups=kept, least=1e-20, scale=1.7)
    return Glm4MoeTopkRouter(config), Experts(Gated(20, "silu"), 12, 4, normalize, routing)


def ernie(least: float) -> tuple[nn.Module, Experts]:
    config = Ernie4_5_MoeConfig(hidden_size=24, moe_num_experts=12, moe_k=4, moe_norm_min=least)
    return Ernie4_5_MoeTopKRouter(config), Experts(Gated(20, "silu"), 12, 4, True, Corrected("softmax", least=least))


def phimoe(jitter: float) -> tuple[nn.Module, Experts]:
    config = PhimoeConfig(hidden_size=24, num_local_experts=12, router_jitter_noise=jitter)
    return PhimoeTopKRouter(config), Experts(Gated(20, "silu"), 12, 2, False, SparseMixer(2 * jitter))


@pytest.mark.parametrize("packed", [False, True])
def test_clamped_experts_equal_transformers(packed: bool) -> None:
    config = GptOssConfig(
        hidden_size=24, intermediate_size=20, num_local_experts=6, num_experts_per_tok=2, swiglu_limit=0.8
    )
    block = GptOssMLP(config).eval()
    module = make(Experts(Clamped(20, 0.8, 1.702, bias=True), 6, 2, router_bias=True), 24)
    halves = {name: getattr(module.up, name).detach().clone() for name in ("weight", "bias")}
    with torch.no_grad():
        block.router.weight.copy_(module.router.weight)
        block.router.bias.copy_(module.router.bias)
        for name, tensor in halves.items():
            turns = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)
            stored = block.experts.gate_up_proj if name == "weight" else block.experts.gate_up_proj_bias
            stored.copy_(turns.transpose(1, 2) if name == "weight" else turns)
        block.experts.down_proj.copy_(module.down.weight.transpose(1, 2))
        block.experts.down_proj_bias.copy_(module.down.bias)
        if packed:
            for inner in module.modules():
                if isinstance(inner, Linear | ExpertMatrices):
                    inner.pack()
        x = inputs(17, 24)
        expected = block(x[None])[0][0]
    torch.testing.assert_close(run(module, x, padding=2, min_rows=3), expected.view(17, 24), rtol=1e-5, atol=1e-5)


ROUTERS = [glm(1, 1, True), glm(4, 2, False), glm(3, 2, True), ernie(1e-12), ernie(0.4), phimoe(0.01), phimoe(0.4)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("theirs", ROUTERS)
def test_routing_equals_transformers(theirs: tuple[Any, Experts], packed: bool) -> None:
    router, part = theirs
    module = make(part, 24)
    with torch.inference_mode():
        router.eval().weight.copy_(module.router.weight)
        for name, tensor in router.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(module.correction)
        if packed:
            module.router.pack()
        x = inputs(50, 24)
        _, weights, chosen = router(x)
        ours, experts = module.route(x)
    expected = torch.zeros(50, part.count).scatter(1, chosen, weights)
    torch.testing.assert_close(torch.zeros(50, part.count).scatter(1, experts, ours), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
# Rows that are no whole cache lines, among others.
@pytest.mark.parametrize(("hidden", "width", "count", "active"), [(96, 40, 6, 2), (48, 24, 9, 4), (256, 96, 16, 8)])
def test_a_token_gets_the_same_bits_alone_and_in_a_batch(
    hidden: int,
    width: int,
    count: int,
    active: int,
    dtype: torch.dtype,
    packed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = make(Experts(Gated(width, "silu"), count, active), hidden, dtype, packed=packed)
    with caplog.at_level(logging.INFO, "octavo.execution"):
        least = min_invariant_rows(module)
    if "may depend" in caplog.text:
        pytest.skip("no row count is invariant on this machine, and the log says so")
    x = inputs(40, hidden, dtype)
    together = run(module, x, min_rows=least)
    assert together.any(1).all()
    for start, stop in [*((token, token + 1) for token in range(40)), (3, 5), (7, 18), (5, 40)]:
        some = run(module, x[start:stop], padding=max(least - (stop - start), 0), min_rows=least)
        assert torch.equal(some, together[start:stop])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    assert torch.equal(run(module, x[order], min_rows=least), together[order])


def test_a_token_does_not_see_what_the_others_hold() -> None:
    """Not even what fills its experts' groups up."""
    module = make(Experts(Gated(16, "silu"), 8, 2), 32)
    x = inputs(6, 32)
    spoiled = x.clone()
    spoiled[0] = torch.inf
    assert torch.equal(run(module, x, min_rows=6)[1:], run(module, spoiled, min_rows=6)[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_experts_equal_plain_ones(dtype: torch.dtype) -> None:
    part = Experts(Gated(40, "silu"), 5, 2)
    packed = make(part, 64, dtype, packed=True)
    x = inputs(20, 64, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(run(packed, x), run(make(part, 64, dtype), x), rtol=tolerance, atol=tolerance)
    if packed.up.packed is not None:
        assert packed.up.weight.numel() == packed.down.weight.numel() == 0


def counted(module: ExpertsFeedForward, x: Tensor, **how: int) -> list[tuple[int, int]]:
    """(expert, rows) of each product with the experts' first matrices; the second ones' are the same."""
    calls: dict[str, list[tuple[int, int]]] = {"up": [], "down": []}
    handles = [
        getattr(module, name).register_forward_pre_hook(
            lambda _, given, calls=calls[name]: calls.append((given[1], given[0].shape[0]))
        )
        for name in calls
    ]
    run(module, x, **how)
    for handle in handles:
        handle.remove()
    assert calls["up"] == calls["down"]
    return calls["up"]


def test_one_product_per_expert_that_has_tokens() -> None:
    module = make(Experts(Gated(16, "silu"), 12, 3), 32)
    x = inputs(9, 32)
    chosen = module.route(x)[1]
    expected = [(expert, int((chosen == expert).sum())) for expert in sorted(set(chosen.flatten().tolist()))]
    assert len(expected) < 12
    assert sum(rows for _, rows in expected) == 9 * 3
    assert counted(module, x) == expected
    # Padding is routed nowhere: the groups are those of the tokens.
    assert counted(module, x, padding=4) == expected
    assert counted(module, x, padding=4, min_rows=5) == [(expert, max(rows, 5)) for expert, rows in expected]
    assert counted(module, x[:1]) == [(expert, 1) for expert in sorted(chosen[0].tolist())]


def test_all_tokens_may_go_to_one_expert() -> None:
    module = make(Experts(Gated(16, "silu"), 4, 1), 32)
    module.router.weight.zero_()
    module.router.weight[2] = 1.0
    x = inputs(7, 32).abs()
    assert counted(module, x) == [(2, 7)]
    torch.testing.assert_close(run(module, x).double(), one_by_one(module, x), rtol=1e-4, atol=1e-5)


def test_a_step_without_tokens_gives_zeros() -> None:
    module = make(Experts(Gated(16, "silu"), 4, 2), 32)
    assert counted(module, inputs(0, 32), padding=3) == []
