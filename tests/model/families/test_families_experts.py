"""Families with experts: what is refused, and how experts are stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import restore
from support.families import FAMILY_SHAPES
from support.family_shape import build_reference
from support.pages import load
from support.published import MIXTRAL_8X7B, QWEN3_30B_A3B, read

from engine.errors import ModelLoadError, UnsupportedModelError

SMALL: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
}  # fmt: skip
GLM = SMALL | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
}
ERNIE = SMALL | {"architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_num_experts": 6}
PHIMOE = SMALL | {"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe"}
QWEN2 = SMALL | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 6}
GPT_OSS = SMALL | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4}
DEEPSEEK = SMALL | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
}
DEEPSEEK_V2 = DEEPSEEK | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
DEEPSEEK_V3 = DEEPSEEK | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
LLAMA4 = SMALL | {"architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text"}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "short_mscale": 1.2,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, r"num_experts_per_tok .* from 1 to .* 8; got 9"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 0}, r"num_experts_per_tok .* got 0"),
        (MIXTRAL_8X7B, {"sliding_window": 0}, r"sliding_window .* at least 1, or null .* got 0"),
        (MIXTRAL_8X7B, {"hidden_act": "laplace"}, "'laplace'"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, r"num_experts_per_tok .* 128; got 129"),
        ({**GLM, "n_group": 3}, {}, "n_group .* must divide .* 8; got 3"),
        ({**GLM, "n_group": 4}, {"topk_group": 5}, "topk_group .* from 1 to n_group 4; got 5"),
        ({**GLM, "n_group": 8}, {"topk_group": 4}, "n_group of the config is 8: .* at least 2 of the 8 experts"),
        (
            {**GLM, "n_group": 4},
            {"num_experts_per_tok": 3},
            "topk_group 1 groups must have at least num_experts_per_tok 3",
        ),
        (GLM, {"n_shared_experts": 0}, "n_routed_experts and n_shared_experts .* got 8 and 0"),
        (
            DEEPSEEK_V2,
            {"topk_method": "noaux_tc"},
            "topk_method .* 'greedy' or 'group_limited_greedy' .* got 'noaux_tc'",
        ),
        (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob .* must be False .* got True"),
        (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func .* must be 'softmax' .* got 'sigmoid'"),
        (DEEPSEEK_V2, {"topk_method": "group_limited_greedy", "n_group": 3}, "n_group .* must divide .* 8; got 3"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func .* must be 'sigmoid' .* got 'softmax'"),
        (DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method .* must be 'noaux_tc' .* got 'greedy'"),
        (DEEPSEEK_V3, {"num_key_value_heads": 2}, "num_key_value_heads .* must be 4 .* got 2"),
        (DEEPSEEK_V3, {"head_dim": 32}, "head_dim .* must be 64 .* got 32"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq .* must be 1 .* got 2"),
        (DEEPSEEK_V3, {"n_shared_experts": 0}, "n_routed_experts and n_shared_experts .* got 8 and 0"),
        (DEEPSEEK_V3, {"rope_scaling": YARN | {"mscale_all_dim": "1"}}, "mscale_all_dim .* must be a number"),
        (
            LLAMA4,
            {"layer_types": ["sliding_attention"] * 4},
            "'sliding_attention'; implemented: full_attention, chunked",
        ),
        (LLAMA4, {"attention_chunk_size": None}, "attention_chunk_size is null"),
        (LLAMA4, {"num_experts_per_tok": 17}, "num_experts_per_tok .* 16; got 17"),
        (LLAMA4, {"rope_scaling": YARN | {"mscale": 2.0}}, "use_qk_norm .* must be false where rope_parameters scale"),
        (ERNIE, {"moe_layer_interval": 0}, "moe_layer_interval .* at least 1, got 0"),
        (ERNIE, {"moe_k": 7}, r"num_experts_per_tok .* 6; got 7"),
        (PHIMOE, {"num_experts_per_tok": 3}, "num_experts_per_tok .* must be 2 .* got 3"),
        (PHIMOE, {"rope_scaling": LONG | {"long_mscale": 1.5}}, "short_mscale and long_mscale the same .* 1.2 and 1.5"),
        (GPT_OSS, {"hidden_act": "gelu"}, "hidden_act .* must be 'silu' for gpt-oss, got 'gelu'"),
        (QWEN2, {"decoder_sparse_step": 0}, r"decoder_sparse_step .* at least 1, got 0"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 0}, r"decoder_sparse_step .* at least 1, got 0"),
    ],
)
def test_refusals(config: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, config, **changes)


SPARSE = ["mixtral", "qwen3-moe-one-dense-layer-window"]


@pytest.mark.parametrize("name", SPARSE)
def test_experts_stored_one_by_one_or_in_one_tensor(name: str, tmp_path: Path) -> None:
    reference = build_reference(FAMILY_SHAPES[name])
    reference.save_pretrained(tmp_path / "each")
    reference.save_pretrained(tmp_path / "fused", save_original_format=False)
    each, fused = (load_file(tmp_path / form / "model.safetensors") for form in ("each", "fused"))
    first = ".block_sparse_moe.experts.0.w1.weight" if name == "mixtral" else ".mlp.experts.0.gate_proj.weight"
    assert f"model.layers.0{first}" in each
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
    assert len(fused) < len(each)
    ours = dict(load(tmp_path / "each").named_parameters())
    for parameter, value in load(tmp_path / "fused").named_parameters():
        assert torch.equal(ours[parameter], value), parameter


@pytest.mark.parametrize("name", [*SPARSE, "gemma3", "olmo2-grouped-biases-tied", "olmo3-yarn-biases-tied"])
def test_a_checkpoint_without_its_head(name: str, tmp_path: Path) -> None:
    """The bare model's names lack the prefix; its embedding is the head."""
    shape = FAMILY_SHAPES[name]
    whole = build_reference(replace(shape, settings={**shape.settings, "tie_word_embeddings": True}))
    whole.save_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "bare")
    config = json.loads((tmp_path / "bare" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"][0].endswith("Model")
    assert "layers.0.self_attn.q_proj.weight" in load_file(tmp_path / "bare" / "model.safetensors")
    ours = dict(load(tmp_path / "whole").named_parameters())
    for parameter, value in load(tmp_path / "bare").named_parameters():
        assert torch.equal(ours[parameter], value), parameter


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    build_reference(FAMILY_SHAPES["mixtral"]).save_pretrained(tmp_path)
    gone = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    restore(tmp_path, lambda held: {name: tensor for name, tensor in held.items() if name != gone})
    with pytest.raises(ModelLoadError, match=r"lacks tensors.*layers\.1\.block_sparse_moe\.experts\.3\.w3\.weight"):
        load(tmp_path)


def test_layers_that_guess_later_tokens_are_left_unread(tmp_path: Path) -> None:
    """They stand after the last layer of a checkpoint of GLM-4.5."""
    shape = FAMILY_SHAPES["glm4-moe"]
    build_reference(shape).save_pretrained(tmp_path)
    restore(tmp_path, lambda held: held | {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)})
    load(tmp_path, torch.float32)
    restore(tmp_path, lambda held: held | {"model.layers.4.eh_proj.weight": torch.zeros(4, 4)})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.4\.eh_proj"):
        load(tmp_path, torch.float32)
