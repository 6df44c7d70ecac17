"""Families whose layers carry a state: the parts of their configs, and the settings that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from support.family_shapes import mamba2

from engine import UnsupportedModelError
from engine.model import families
from engine.model.missing import unsupported
from engine.model.spec import NO_ATTENTION, NO_NETWORK, Dense, ModelSpec, Pre, SelectiveScan, Shared


def described(name: str, **settings: Any) -> ModelSpec:
    """The parts of one of the shapes, with these settings."""
    shape = mamba2.SHAPES[name]
    kind = getattr(transformers, shape.architecture).config_class
    config = kind(**{**shape.settings, "vocab_size": 99, **settings})
    config.architectures = [shape.architecture]
    return families.describe(config)


def test_scans_have_states_for_their_convolution_and_their_matrices() -> None:
    model = described("bamba")
    assert model.decoder is not None
    scan = SelectiveScan(heads=4, head_dim=16, groups=1, size=12, kernel=4, eps=1e-5, kernel_bias=True)
    assert [block.mixing for block in model.decoder.blocks] == [scan, None, scan, None]
    assert model.state_sizes == [3 * (64 + 2 * 12) + 64 * 12] * 2
    assert len(model.decoder.attentions) == 2


def test_attention_and_scans_are_in_the_same_layers_of_falcon_h1() -> None:
    model = described("falcon-h1")
    assert model.decoder is not None
    assert len(model.state_sizes) == len(model.decoder.attentions) == len(model.decoder.blocks) == 2
    factors = {name: numbers for name, numbers, _ in model.decoder.blocks[0].factors}
    assert factors["attention.qkv.weight"] == pytest.approx((0.8, 0.48, 0.8))
    assert factors["state.enter.weight"] == pytest.approx((1.08, 0.96, 1.32, 1.44, 0.84))


def test_each_layer_of_nemotron_h_is_one_sublayer() -> None:
    model = described("nemotron-h-moe-odd")
    assert model.decoder is not None
    blocks = model.decoder.blocks
    assert [block.attention == NO_ATTENTION for block in blocks] == [True, True, True, False, True]
    assert [block.ffn == NO_NETWORK for block in blocks] == [True, False, True, True, False]
    network = blocks[1].ffn
    assert isinstance(network, Shared)
    assert isinstance(network.routed.expert, Dense)
    assert isinstance(blocks[1].placement, Pre)
    assert blocks[1].placement.attention is None


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("granite4", {"time_step_limit": (0.0, 1.0)}, r"time_step_limit of the config .* infinity, got \[0.0, 1.0\]"),
        ("granite4", {"hidden_act": "gelu"}, "hidden_act of the config must be 'silu'.*'gelu'"),
        ("granite4", {"residual_multiplier": 0.0}, "must be above 0, and logits_scaling not 0; got 0.0 and 1.5"),
        ("bamba", {"mamba_n_groups": 3}, "heads that the groups share evenly; the config has 4, 16, 3, 12"),
        ("bamba", {"mamba_d_conv": 1}, "must see from 2 to 64 tokens, got 1"),
        ("falcon-h1", {"ssm_multipliers": [1.0]}, "must have 5 numbers and mlp_multipliers 2, but they have 1 and 2"),
        ("nemotron-h-moe-odd", {"moe_latent_size": 8}, "moe_latent_size of the config is 8"),
    ],
)
def test_other_settings_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        described(name, **settings)


def test_models_without_attention_are_refused_by_name() -> None:
    model = described("nemotron-h", layers_block_type=["linear_attention", "mlp"])
    assert unsupported(model) == ["a decoder without attention"]
