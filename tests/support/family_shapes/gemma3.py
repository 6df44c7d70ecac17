"""Gemma 3, its text model: norms per head, windows in most layers, and a rotary base for each kind of layer."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "query_pre_attn_scalar": 10,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}
SCALED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
}

SHAPES = {
    "gemma3": FamilyShape("Gemma3ForCausalLM", BASE, eos_gain=3.2, prompts=(7, 9, 0, 1)),
    "gemma3-scaled-biases-untied": FamilyShape(
        "Gemma3ForCausalLM",
        BASE
        | {
            "num_key_value_heads": 1,
            "sliding_window": 6,
            "attention_bias": True,
            "rope_parameters": SCALED,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 9.0,
        },
        eos=(3, 90),
        prompts=(0, 1, 2, 3),
    ),
}
