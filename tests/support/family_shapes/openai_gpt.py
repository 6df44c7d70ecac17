"""GPT, the first: norms after the sums, none at the end."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

SHAPES = {
    "gpt": FamilyShape("OpenAIGPTLMHeadModel", BASE, eos_gain=2.6, prompts=(1, 7, 4, 0)),
    "gpt-silu-untied": FamilyShape(
        "OpenAIGPTLMHeadModel",
        BASE | {"n_embd": 36, "n_head": 3, "afn": "silu", "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3},
        eos=(3, 90),
        eos_gain=2.6,
        prompts=(5, 11, 0, 6),
    ),
}
