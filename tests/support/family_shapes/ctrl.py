"""CTRL: scaled embeddings with sinusoidal positions, a head with a bias."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "dff": 56}

SHAPES = {
    "ctrl": FamilyShape("CTRLLMHeadModel", BASE, eos_gain=2.2, prompts=(3, 7, 0, 1)),
    "ctrl-untied": FamilyShape(
        "CTRLLMHeadModel",
        BASE | {"n_embd": 36, "n_head": 3, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
        eos=(3, 90),
        eos_gain=2.2,
        prompts=(0, 12, 1, 2),
    ),
}
