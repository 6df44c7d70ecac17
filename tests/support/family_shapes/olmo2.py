"""OLMo 2 and 3: norms after the sublayers, and over whole projections of query and key; windows in OLMo 3."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
WINDOWS: dict[str, Any] = BASE | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
# Only the layers without a window are scaled.
YARN: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.2,
    },
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
    "olmo3": FamilyShape("Olmo3ForCausalLM", WINDOWS, prompts=(3, 4, 2, 0)),
    "olmo3-yarn-biases-tied": FamilyShape(
        "Olmo3ForCausalLM",
        WINDOWS | {"sliding_window": 6, "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN},
        eos=(3, 90),
        prompts=(3, 9, 0, 1),
    ),
}
