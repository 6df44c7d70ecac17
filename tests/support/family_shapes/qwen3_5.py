"""Qwen3.5 and Qwen3-Next: gated delta rule with a state, gated attention in some layers; with experts."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# Heads in odd numbers, features in more than one piece of the kernel; every layer has a state but one.
ODD = BASE | {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 70,
    "linear_conv_kernel_dim": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
EXPERTS = BASE | {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
DENSE_LAYERS = EXPERTS | {"mlp_only_layers": [0], "norm_topk_prob": False, "linear_num_value_heads": 6}
# All experts of a token: no rounding chooses between two.
ODD_EXPERTS = {**EXPERTS, **ODD, "num_experts": 3, "num_experts_per_tok": 3}
for settings in (EXPERTS, ODD_EXPERTS):
    del settings["intermediate_size"]

SHAPES = {
    "qwen3.5": FamilyShape("Qwen3_5ForCausalLM", BASE, eos_gain=1.4, prompts=(1, 2, 0, 6)),
    "qwen3.5-odd-tied": FamilyShape("Qwen3_5ForCausalLM", ODD, prompts=(0, 1, 2, 3)),
    "qwen3.5-moe": FamilyShape("Qwen3_5MoeForCausalLM", EXPERTS, prompts=(6, 7, 0, 5)),
    "qwen3.5-moe-odd-tied": FamilyShape("Qwen3_5MoeForCausalLM", ODD_EXPERTS, prompts=(4, 6, 1, 0)),
    "qwen3-next": FamilyShape("Qwen3NextForCausalLM", DENSE_LAYERS, prompts=(3, 10, 0, 1)),
    "qwen3-next-odd-tied": FamilyShape("Qwen3NextForCausalLM", ODD_EXPERTS, prompts=(4, 8, 0, 6)),
}
