"""OLMo-Hybrid: the gated delta rule with doubled shares, attention with norms after the sublayers in some layers."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    # Queries, keys and values are equally wide: transformers writes their kernels in equal parts, whatever they are.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 12,
}

SHAPES = {
    "olmo-hybrid": FamilyShape("OlmoHybridForCausalLM", BASE, eos_gain=2.2, prompts=(0, 1, 6, 2)),
    "olmo-hybrid-rotary-tied": FamilyShape(
        "OlmoHybridForCausalLM",
        BASE
        | {
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 70,
            "linear_value_head_dim": 70,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        prompts=(1, 2, 0, 3),
    ),
}
