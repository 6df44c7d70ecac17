"""Gemma 2, Gemma 3, OLMo 2 and 3, Command R+ and StableLM 2, which differ in where their norms stand: what published
configs are made of, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import FAMILY_SHAPES
from support.family_shape import build_reference, run
from support.pages import Pages, load, scattered_tables
from support.published import GEMMA_2_2B, GEMMA_3_1B, GEMMA_3_4B, OLMO_2_7B, OLMO_3_7B, decoder, read

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.normalisation import Norm
from engine.model.positions import LinearScaling, Rotary, YarnScaling
from engine.model.spec import (
    AfterSublayer,
    Attention,
    EachHead,
    Gated,
    Lm,
    Parallel,
    PerHead,
    Sandwich,
    Tokens,
    WholeProjection,
)


def test_gemma_2_as_published(tmp_path: Path) -> None:
    model = read(tmp_path, GEMMA_2_2B)
    norm = Norm("rms", 1e-6, unit_offset=True)
    stack = decoder(model)
    assert model.head == Lm(tied=True, softcap=30.0)
    assert stack.embedding == Tokens(vocab_size=256000, width=2304, scale=48.0)
    assert stack.final_norm == norm
    local = Attention(
        heads=8,
        kv_heads=4,
        head_dim=256,
        scale=1 / 16,
        position=Rotary(256, 1e4),
        window=Window(4095),
        softcap=50.0,
    )
    assert [block.attention for block in stack.blocks] == [local, replace(local, window=None)] * 13
    assert {block.placement for block in stack.blocks} == {Sandwich(norm, norm, norm, norm)}
    assert {block.ffn for block in stack.blocks} == {Gated(9216, "gelu_tanh")}


def test_gemma_3_as_published(tmp_path: Path) -> None:
    model = read(tmp_path, GEMMA_3_1B)
    norm = Norm("rms", 1e-6, unit_offset=True)
    stack = decoder(model)
    assert model.head == Lm(tied=True)
    assert stack.embedding == Tokens(vocab_size=262144, width=1152, scale=1152**0.5)
    assert stack.final_norm == norm
    local = Attention(
        heads=4,
        kv_heads=1,
        head_dim=256,
        scale=1 / 16,
        position=Rotary(256, 1e4),
        window=Window(511),
        qk_norm=PerHead(norm),
    )
    everywhere = replace(local, window=None, position=Rotary(256, 1e6))
    assert [block.attention for block in stack.blocks] == ([local] * 5 + [everywhere]) * 4 + [local] * 2
    assert {block.placement for block in stack.blocks} == {Sandwich(norm, norm, norm, norm)}
    assert {block.ffn for block in stack.blocks} == {Gated(6912, "gelu_tanh")}


def test_gemma_3_text_part_of_a_larger_model(tmp_path: Path) -> None:
    """Only layers that see all tokens are stretched."""
    text = {"architectures": ["Gemma3ForCausalLM"], **GEMMA_3_4B["text_config"]}
    blocks = decoder(read(tmp_path, text)).blocks
    assert len(blocks) == 34
    assert [i for i, block in enumerate(blocks) if block.attention.window is None] == [5, 11, 17, 23, 29]
    assert blocks[0].attention.window == Window(1023)
    assert blocks[0].attention.position == Rotary(256, 1e4)
    assert blocks[5].attention.position == Rotary(256, 1e6, scaling=LinearScaling(8.0))


def test_gemma_3_altered(tmp_path: Path) -> None:
    model = read(
        tmp_path,
        GEMMA_3_1B,
        num_hidden_layers=3,
        sliding_window_pattern=2,
        query_pre_attn_scalar=144,
        attention_bias=True,
        final_logit_softcapping=20.0,
        tie_word_embeddings=False,
    )
    blocks = decoder(model).blocks
    assert [block.attention.window for block in blocks] == [Window(511), None, Window(511)]
    assert {block.attention.scale for block in blocks} == {1 / 12}
    assert blocks[0].attention.qkv_bias
    assert blocks[0].attention.out_bias
    assert model.head == Lm(tied=False, softcap=20.0)
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    blocks = decoder(read(tmp_path, GEMMA_3_1B, num_hidden_layers=3, layer_types=kinds)).blocks
    assert [block.attention.window for block in blocks] == [None, None, Window(511)]


def test_olmo_2_as_published(tmp_path: Path) -> None:
    model = read(tmp_path, OLMO_2_7B)
    norm = Norm("rms", 1e-6, in_float32=True)
    stack = decoder(model)
    assert model.head == Lm(tied=False)
    assert stack.embedding == Tokens(vocab_size=100352, width=4096)
    assert stack.final_norm == norm
    assert len(stack.blocks) == 32
    (block,) = set(stack.blocks)
    assert block.placement == AfterSublayer(norm, norm)
    assert block.attention == Attention(
        heads=32,
        kv_heads=32,
        head_dim=128,
        scale=128**-0.5,
        position=Rotary(128, 5e5, in_float32=True),
        qk_norm=WholeProjection(norm),
    )
    assert block.ffn == Gated(11008, "silu")


def test_olmo_3_as_published(tmp_path: Path) -> None:
    """OLMo 2's blocks with windows; only the layers without one are stretched."""
    before, after = (decoder(read(tmp_path, config)).blocks for config in (OLMO_2_7B, OLMO_3_7B))
    yarn = YarnScaling(8.0, fast=32.0, slow=1.0, original_length=8192, attention_factor=1.2079441541679836)
    local = replace(before[0].attention, window=Window(4095))
    everywhere = replace(local, window=None, position=Rotary(128, 5e5, in_float32=True, scaling=yarn))
    assert [block.attention for block in after] == [local, local, local, everywhere] * 8
    assert {replace(block, attention=local) for block in after} == {replace(before[0], attention=local)}


SLIDING = {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GEMMA_2_2B, {**SLIDING, "sliding_window": None}, r"'sliding_attention', but sliding_window is null"),
        (GEMMA_2_2B, {**SLIDING, "sliding_window": 0}, r"sliding_window .* got 0"),
        (GEMMA_2_2B, {**SLIDING, "layer_types": ["chunked_attention"] * 2}, r"layer_types .* 'chunked_attention'"),
        (GEMMA_2_2B, {"use_bidirectional_attention": True}, "bidirectional attention"),
        (GEMMA_3_1B, {**SLIDING, "sliding_window": None}, r"'sliding_attention', but sliding_window is null"),
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping .* got 50"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "bidirectional attention"),
        (OLMO_3_7B, {"sliding_window": None}, r"'sliding_attention', but sliding_window is null"),
        (OLMO_2_7B, {"hidden_act": "laplace"}, "'laplace'"),
    ],
)
def test_refusals(config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, config, **changes)


COMMAND_R_PLUS: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"], "model_type": "cohere", "hidden_size": 12288, "intermediate_size": 33792,
    "num_hidden_layers": 64, "num_attention_heads": 96, "num_key_value_heads": 8, "vocab_size": 256000,
    "layer_norm_eps": 1e-5, "logit_scale": 0.833, "max_position_embeddings": 8192, "rope_theta": 75000000.0,
    "hidden_act": "silu", "attention_bias": False, "use_qk_norm": True, "tie_word_embeddings": True,
}  # fmt: skip
STABLELM_2_12B: dict[str, Any] = {
    "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "hidden_size": 5120, "intermediate_size": 13824,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100352,
    "layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25, "rope_theta": 10000,
    "hidden_act": "silu", "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False,
}  # fmt: skip


@pytest.mark.parametrize(("config", "switch"), [(COMMAND_R_PLUS, "use_qk_norm"), (STABLELM_2_12B, "qk_layernorm")])
def test_norms_of_each_head_as_published(config: dict[str, Any], switch: str, tmp_path: Path) -> None:
    for norm, settings in ((EachHead(Norm("layer", 1e-5)), config), (None, config | {switch: False})):
        blocks = decoder(read(tmp_path, settings)).blocks
        assert {block.attention.qk_norm for block in blocks} == {norm}
        assert isinstance(blocks[0].placement, Parallel)


def test_configs_in_their_older_form_mean_the_same(tmp_path: Path) -> None:
    """Published Gemma 3 configs have a pattern for the windows, and the rotary bases beside each other."""
    shape = FAMILY_SHAPES["gemma3-scaled-biases-untied"]
    reference = build_reference(shape)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config.pop("layer_types") == ["sliding_attention", "full_attention", "sliding_attention"]
    ropes = config.pop("rope_parameters")
    theta, scaling = ropes["full_attention"].pop("rope_theta"), ropes["full_attention"]
    config |= {
        "sliding_window_pattern": 2,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_local_base_freq": ropes["sliding_attention"]["rope_theta"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    prompt = list(range(2, 40))
    (ours,) = Pages(load(tmp_path), scattered_tables([len(prompt)])).step([prompt])
    torch.testing.assert_close(ours, run(reference.base_model, prompt).last_hidden_state[0], rtol=1e-4, atol=1e-4)
