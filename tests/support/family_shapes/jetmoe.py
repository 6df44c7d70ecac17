"""JetMoE: experts in attention and in networks."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": 3,
    "kv_channels": 12,
    "intermediate_size": 40,
    "max_position_embeddings": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-3,
}

SHAPES = {
    "jetmoe": FamilyShape("JetMoeForCausalLM", BASE, eos_gain=3.2, prompts=(1, 11, 0, 2)),
    "jetmoe-odd-untied": FamilyShape(
        "JetMoeForCausalLM",
        BASE
        | {
            "hidden_size": 36,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "kv_channels": 10,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
        prompts=(2, 4, 0, 1),
    ),
}
