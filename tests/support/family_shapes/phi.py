"""Phi: parallel blocks with one norm, rotary positions in a part of each head, a bias in the head."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}

SHAPES = {
    "phi": FamilyShape("PhiForCausalLM", BASE, seed=1, eos_gain=2.2, prompts=(2, 36, 0, 1)),
    "phi-grouped-quarter-rotary": FamilyShape(
        "PhiForCausalLM",
        BASE
        | {
            "hidden_size": 64,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.25},
            "hidden_act": "gelu",
        },
        eos=(3, 90),
        prompts=(1, 4, 0, 3),
    ),
    "phi-norms-per-head": FamilyShape("PhiForCausalLM", BASE | {"qk_layernorm": True}, prompts=(0, 1, 2, 3)),
}
