"""Families whose layers carry a state: the settings that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from support.family_shapes import mamba2

from engine import UnsupportedModelError
from engine.model import families
from engine.model.gguf import architectures
from engine.model.gguf.blocks import find_format
from engine.model.gguf.container import Gguf, TensorInfo
from engine.model.missing import unsupported
from engine.model.spec import ModelSpec


def described(name: str, **settings: Any) -> ModelSpec:
    """The parts of one of the shapes, with these settings."""
    shape = mamba2.SHAPES[name]
    kind = getattr(transformers, shape.architecture).config_class
    config = kind(**{**shape.settings, "vocab_size": 99, **settings})
    config.architectures = [shape.architecture]
    return families.describe(config)


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


def header(architecture: str, tensors: dict[str, tuple[int, ...]], **settings: Any) -> Gguf:
    """The header of a GGUF file with two layers."""
    usual = {"block_count": 2, "context_length": 96, "embedding_length": 64, "feed_forward_length": 96}
    usual |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    scan = {"time_step_rank": 4, "inner_size": 128, "group_count": 2, "state_size": 16, "conv_kernel": 4}
    usual |= {f"ssm.{name}": value for name, value in scan.items()} | settings
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": each for key, each in usual.items()}
    shapes = {"token_embd.weight": (99, 64)} | tensors
    infos = {name: TensorInfo(name, shape, find_format(0), 0, 0) for name, shape in shapes.items()}
    return Gguf(Path("x.gguf"), 3, metadata, infos)


def test_layers_of_a_gguf_file_that_guess_later_tokens_are_not_read() -> None:
    tensors = {"blk.0.ssm_a": (4,), "blk.1.attn_norm.weight": (64,), "blk.2.nextn.eh_proj.weight": (64, 128)}
    settings = {"block_count": 3, "nextn_predict_layers": 1, "full_attention_interval": 2}
    file = header("qwen35", tensors, **settings)
    architecture, config = architectures.describe(file)
    assert config["num_hidden_layers"] == 2
    assert config["layer_types"] == ["linear_attention", "full_attention"]
    names = [placed.name for placed in architectures.place(file, architecture, config)]
    assert names == [
        "model.embed_tokens.weight", "model.layers.0.linear_attn.A_log", "model.layers.1.input_layernorm.weight",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("granitehybrid", {"rope.scaling.finetuned": True}, "finetuned must be False, got True: rotary positions"),
        ("granitehybrid", {"ssm.inner_size": 100}, "ssm.inner_size 100 must be a multiple of embedding_length 64"),
        ("falcon-h1", {"ssm.time_step_rank": 3}, "ssm.inner_size 128 must be a multiple of ssm.time_step_rank 3"),
        ("nemotron_h", {"feed_forward_length": [96, 48]}, "feed_forward_length is 48 in one layer and 96 in another"),
        ("nemotron_h_moe", {"expert_count": 4, "expert_shared_count": 2}, "expert_shared_count must be 1, got 2"),
        ("jamba", {"ssm.inner_size": 100}, "ssm.inner_size 100 must be a multiple of embedding_length 64"),
        (
            "jamba",
            {"attention.head_count_kv": [1, 2]},
            "of keys or none, but one has 1 and another 2",
        ),
        (
            "jamba",
            {"block_count": 4, "attention.head_count_kv": [2, 2, 0, 2]},
            "the layers 0, 1, 3 are not those of any attn_layer_period",
        ),
    ],
)
def test_other_settings_of_gguf_files_are_refused(architecture: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        architectures.describe(header(architecture, {f"blk.{i}.attn_norm.weight": (64,) for i in range(4)}, **settings))
