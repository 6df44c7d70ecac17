"""Qwen3.5: gated delta rule with a state, gated attention in some layers; with experts."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS = BASE | {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
del EXPERTS["intermediate_size"]

SHAPES = {
    "qwen3.5": FamilyShape("Qwen3_5ForCausalLM", BASE, prompts=(0, 1, 2, 3)),
    "qwen3.5-moe": FamilyShape("Qwen3_5MoeForCausalLM", EXPERTS, prompts=(0, 1, 2, 3)),
}
