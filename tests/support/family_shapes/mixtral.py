"""Mixtral: experts in every layer, with and without a window."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2}

SHAPES = {
    "mixtral": FamilyShape("MixtralForCausalLM", BASE, prompts=(0, 5, 1, 2)),
    "mixtral-three-of-seven-window-tied": FamilyShape(
        "MixtralForCausalLM",
        BASE
        | {
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 4,
            "sliding_window": 8,
            "tie_word_embeddings": True,
        },
        prompts=(0, 19, 1, 2),
    ),
}
