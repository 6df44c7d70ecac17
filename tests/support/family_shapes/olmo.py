"""OLMo: norms without weights, clipped projections."""

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
    "olmo": FamilyShape("OlmoForCausalLM", BASE, eos_gain=2.2, prompts=(0, 7, 1, 2)),
    "olmo-clipped-biases-tied": FamilyShape(
        "OlmoForCausalLM",
        BASE | {"clip_qkv": 0.7, "attention_bias": True, "tie_word_embeddings": True},
        eos_gain=2.6,
        prompts=(0, 3, 1, 2),
    ),
}
