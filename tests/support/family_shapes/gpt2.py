"""GPT-2: learned positions, tied and untied heads, scores scaled by layer or not at all."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

SHAPES = {
    "gpt2": FamilyShape("GPT2LMHeadModel", BASE, prompts=(26, 29, 4, 5), eos_gain=3.2),
    "gpt2-odd-heads-scaled-by-layer-untied": FamilyShape(
        "GPT2LMHeadModel",
        BASE
        | {
            "n_embd": 30,
            "n_head": 3,
            "n_inner": 44,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
        eos=(5, 60),
        prompts=(36, 59, 2, 5),
    ),
    "gpt2-unscaled": FamilyShape(
        "GPT2LMHeadModel",
        BASE | {"scale_attn_weights": False, "layer_norm_epsilon": 1e-2, "n_layer": 3},
        prompts=(1, 3, 0, 2),
    ),
}
