"""Nemotron: layer norms stored as deviations from 1, a part of each head rotates, squared ReLU."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

SHAPES = {
    "nemotron": FamilyShape("NemotronForCausalLM", BASE, eos_gain=4.0, prompts=(2, 6, 0, 1)),
    "nemotron-biases-tied": FamilyShape(
        "NemotronForCausalLM",
        BASE
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
        eos_gain=2.2,
        prompts=(3, 4, 0, 5),
    ),
}
