"""DBRX: clipped queries, keys and values, experts whose matrices are stored as one."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}

SHAPES = {
    "dbrx": FamilyShape(
        "DbrxForCausalLM",
        BASE
        | {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10_000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 5, "moe_top_k": 2},
        },
        prompts=(0, 1, 5, 2),
    ),
    "dbrx-not-normalised": FamilyShape(
        "DbrxForCausalLM",
        BASE
        | {
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 500.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "ffn_config": {
                "ffn_hidden_size": 24,
                "moe_num_experts": 4,
                "moe_top_k": 3,
                "moe_normalize_expert_weights": None,
                "ffn_act_fn": {"name": "gelu"},
            },
        },
        eos=(3, 90),
        prompts=(0, 1, 6, 2),
    ),
}
