"""Apertus: xIELU with slopes of each layer's own, norms of queries and keys, llama3 scaling by default."""

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
    "apertus": FamilyShape("ApertusForCausalLM", BASE, prompts=(1, 2, 0, 6)),
    "apertus-biases-tied-own-heads": FamilyShape(
        "ApertusForCausalLM",
        BASE
        | {
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
        eos=(3, 90),
        prompts=(0, 10, 1, 2),
    ),
    "apertus-relu2": FamilyShape("ApertusForCausalLM", BASE | {"hidden_act": "relu2"}, prompts=(0, 1, 2, 3)),
}
