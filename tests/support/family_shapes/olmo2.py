"""OLMo 2: norms after the sublayers, and over whole projections of query and key."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}

SHAPES = {
    "olmo2": FamilyShape("Olmo2ForCausalLM", BASE, prompts=(4, 10, 0, 1)),
    "olmo2-grouped-biases-tied": FamilyShape(
        "Olmo2ForCausalLM",
        BASE
        | {
            "num_key_value_heads": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 300.0},
        },
        eos=(3, 90),
        prompts=(5, 12, 0, 1),
    ),
}
