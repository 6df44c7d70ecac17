"""Granite and GraniteMoE: constants that multiply embeddings, scores, residuals and logits; biases."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}

SHAPES = {
    "granite": FamilyShape("GraniteForCausalLM", BASE, prompts=(0, 1, 3, 2)),
    "granite-biases-tied": FamilyShape(
        "GraniteForCausalLM",
        BASE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "residual_multiplier": 1.4},
        eos_gain=2.2,
        seed=1,
        prompts=(6, 7, 0, 1),
    ),
    "granite-moe": FamilyShape(
        "GraniteMoeForCausalLM",
        BASE | {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2},
        prompts=(1, 2, 0, 3),
    ),
    "granite-moe-biases-tied": FamilyShape(
        "GraniteMoeForCausalLM",
        BASE
        | {
            "intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "residual_multiplier": 1.3,
        },
        eos=(3, 90),
        prompts=(1, 11, 0, 2),
    ),
    "granite-moe-shared": FamilyShape(
        "GraniteMoeSharedForCausalLM",
        BASE
        | {"intermediate_size": 24, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
        prompts=(7, 8, 1, 0),
    ),
    "granite-moe-shared-none-tied": FamilyShape(
        "GraniteMoeSharedForCausalLM",
        BASE
        | {
            "intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        eos_gain=2.2,
        prompts=(3, 19, 0, 1),
    ),
}
