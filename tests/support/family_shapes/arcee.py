"""Arcee: squared ReLU in a plain feed-forward network."""

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
    "arcee": FamilyShape("ArceeForCausalLM", BASE, prompts=(4, 9, 0, 3)),
    "arcee-biases-tied": FamilyShape(
        "ArceeForCausalLM",
        BASE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 10},
        eos_gain=2.6,
        prompts=(1, 10, 0, 2),
    ),
}
