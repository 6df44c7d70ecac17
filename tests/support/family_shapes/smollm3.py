"""SmolLM3: layers without positions, which may have windows; biases; untied heads."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "no_rope_layer_interval": 2,
}

SHAPES = {
    "smollm3": FamilyShape("SmolLM3ForCausalLM", BASE, eos_gain=2.2, prompts=(1, 2, 0, 3)),
    "smollm3-windows-biases-untied": FamilyShape(
        "SmolLM3ForCausalLM",
        BASE
        | {
            "no_rope_layers": [0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        eos=(3, 90),
        eos_gain=1.4,
        prompts=(1, 2, 0, 5),
    ),
}
