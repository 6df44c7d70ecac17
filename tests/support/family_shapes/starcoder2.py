"""StarCoder2: layer norms, rotary positions, a window in all layers."""

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
    "starcoder2": FamilyShape("Starcoder2ForCausalLM", BASE, eos_gain=3.2, seed=1, prompts=(1, 8, 6, 0)),
    "starcoder2-window-no-biases-untied": FamilyShape(
        "Starcoder2ForCausalLM",
        BASE | {"sliding_window": 8, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "relu"},
        eos=(3, 90),
        prompts=(5, 14, 1, 0),
    ),
}
