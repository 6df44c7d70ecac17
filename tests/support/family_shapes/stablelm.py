"""StableLM: a quarter of each head rotates; blocks one after the other, and parallel ones."""

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
    "stablelm": FamilyShape("StableLmForCausalLM", BASE, prompts=(0, 1, 2, 3)),
    "stablelm-parallel-biases-tied": FamilyShape(
        "StableLmForCausalLM",
        BASE
        | {
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
        eos_gain=2.2,
        prompts=(8, 17, 3, 0),
    ),
}
