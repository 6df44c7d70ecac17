"""GPT-BigCode: GPT-2 with one key and value head for all, or with full heads."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}

SHAPES = {
    "gpt-bigcode": FamilyShape("GPTBigCodeForCausalLM", BASE, prompts=(0, 6, 1, 2)),
    "gpt-bigcode-full-heads-untied": FamilyShape(
        "GPTBigCodeForCausalLM",
        BASE | {"multi_query": False, "n_inner": 44, "activation_function": "gelu", "tie_word_embeddings": False},
        eos=(3, 90),
        prompts=(0, 28, 5, 1),
    ),
}
