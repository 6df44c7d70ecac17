"""ERNIE 4.5 and Helium: rotary positions of neighbouring features."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"head_dim": 8}

SHAPES = {
    "ernie4-5": FamilyShape("Ernie4_5ForCausalLM", BASE | {"head_dim": 10}, eos_gain=2.2, prompts=(1, 2, 0, 3)),
    "ernie4-5-biases-untied": FamilyShape(
        "Ernie4_5ForCausalLM",
        BASE | {"use_bias": True, "tie_word_embeddings": False},
        eos=(3, 90),
        prompts=(1, 6, 3, 0),
    ),
    "helium": FamilyShape("HeliumForCausalLM", BASE, prompts=(0, 2, 1, 3)),
    "helium-biases-tied": FamilyShape(
        "HeliumForCausalLM",
        BASE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
        eos_gain=2.2,
        prompts=(3, 7, 0, 1),
    ),
}
