"""Llama 4: chunks and layers without positions, queries that grow with theirs, experts in some layers or in all."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "intermediate_size": 24,
    "intermediate_size_mlp": 44,
    "num_hidden_layers": 4,
    "head_dim": 12,
    "num_local_experts": 5,
    "attention_chunk_size": 16,
    "no_rope_layer_interval": 3,
    "floor_scale": 8,
    "attn_scale": 0.3,
}

SHAPES = {
    "llama4": FamilyShape("Llama4ForCausalLM", BASE | {"interleave_moe_layer_step": 2}, prompts=(2, 5, 0, 1)),
    "llama4-two-experts-biases-untuned-tied": FamilyShape(
        "Llama4ForCausalLM",
        BASE
        | {
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "tie_word_embeddings": True,
            "moe_layers": [0, 1, 3],
            "no_rope_layers": [0, 1, 1, 1],
            "attention_chunk_size": 11,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "chunked_attention"],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        prompts=(4, 6, 2, 0),
    ),
}
