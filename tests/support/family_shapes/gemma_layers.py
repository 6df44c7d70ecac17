"""Gemma 3n and 4: shared keys and values, vectors per layer and token, versions of the stream, experts, wider heads."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 6,
}
BASES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 3000.0, "partial_rotary_factor": 0.5, "factor": 2.0},
}

SHAPES = {
    "gemma3n": FamilyShape(
        "Gemma3nForCausalLM",
        BASE | {"laurel_rank": 5, "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.0]},
        eos_gain=2.2,
        prompts=(11, 14, 10, 0),
    ),
    "gemma3n-unscaled-biases-other-active": FamilyShape(
        "Gemma3nForCausalLM",
        BASE
        | {
            "intermediate_size": [56, 40, 24, 48],
            "laurel_rank": 3,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "attention_bias": True,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 150,
            "final_logit_softcapping": 8.0,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
        prompts=(0, 1, 4, 2),
    ),
    "gemma4": FamilyShape(
        "Gemma4ForCausalLM",
        BASE | {"global_head_dim": 16, "use_double_wide_mlp": True, "rope_parameters": BASES},
        prompts=(7, 32, 6, 0),
    ),
    "gemma4-unified": FamilyShape(
        "Gemma4UnifiedForCausalLM",
        {name: value for name, value in BASE.items() if "per_layer" not in name}
        | {"num_kv_shared_layers": 0, "num_global_key_value_heads": 1, "global_head_dim": 12, "attention_k_eq_v": True},
        eos_gain=2.2,
        prompts=(3, 7, 0, 1),
    ),
    "gemma4-experts-keys-as-values": FamilyShape(
        "Gemma4ForCausalLM",
        BASE
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 12,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 20,
            "final_logit_softcapping": 8.0,
            "use_bidirectional_attention": "vision",
        },
        eos_gain=3.2,
        prompts=(1, 3, 0, 2),
    ),
}
