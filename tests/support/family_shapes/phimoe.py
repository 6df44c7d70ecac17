"""Phi-3.5-MoE: experts chosen one after the other; biases, windows, stretched positions."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"num_hidden_layers": 3, "num_local_experts": 6}

SHAPES = {
    "phimoe": FamilyShape("PhimoeForCausalLM", BASE | {"intermediate_size": 24}, prompts=(2, 3, 0, 1)),
    "phimoe-longrope-biases-window": FamilyShape(
        "PhimoeForCausalLM",
        BASE
        | {
            "num_local_experts": 4,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 8,
            "router_jitter_noise": 0.3,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 2.0],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
                "short_mscale": 1.24,
                "long_mscale": 1.24,
                "original_max_position_embeddings": 128,
                "factor": 2.0,
            },
        },
        prompts=(7, 8, 0, 2),
    ),
}
