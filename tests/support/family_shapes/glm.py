"""GLM-4: a part of each head rotates in pairs of neighbours; norms before the sublayers, or on both sides."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"head_dim": 12}

SHAPES = {
    "glm": FamilyShape("GlmForCausalLM", BASE | {"head_dim": 8}, eos_gain=1.4, prompts=(0, 2, 1, 3)),
    "glm-no-biases-tied": FamilyShape(
        "GlmForCausalLM",
        BASE
        | {
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
        eos_gain=2.2,
        prompts=(10, 13, 7, 0),
    ),
    "glm4": FamilyShape("Glm4ForCausalLM", BASE | {"head_dim": 8}, prompts=(0, 1, 2, 3)),
    "glm4-no-biases-own-head-dim": FamilyShape(
        "Glm4ForCausalLM",
        BASE | {"attention_bias": False, "head_dim": 16, "num_key_value_heads": 1},
        eos=(3, 90),
        prompts=(0, 2, 1, 3),
    ),
}
