"""Mistral and Ministral: a sliding window in every layer, in some, or in none."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"sliding_window": 9}

SHAPES = {
    "mistral": FamilyShape("MistralForCausalLM", BASE, prompts=(0, 7, 2, 6)),
    "mistral-no-window-own-head-dim-tied": FamilyShape(
        "MistralForCausalLM",
        BASE
        | {
            "sliding_window": None,
            "head_dim": 12,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 300.0},
        },
        eos=(3, 90),
        prompts=(2, 3, 0, 1),
    ),
    "ministral": FamilyShape(
        "MinistralForCausalLM",
        BASE | {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 10},
        prompts=(0, 6, 1, 2),
    ),
    "ministral-full-layers-tied": FamilyShape(
        "MinistralForCausalLM",
        BASE | {"layer_types": ["full_attention"] * 2, "head_dim": 8, "tie_word_embeddings": True},
        eos_gain=2.2,
        prompts=(5, 6, 0, 1),
    ),
}
