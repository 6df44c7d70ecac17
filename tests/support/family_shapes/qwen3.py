"""Qwen3: a norm per head of query and key, a head size of its own."""

from typing import Any

from support.family_shape import DECODER, FamilyShape

BASE: dict[str, Any] = DECODER | {"head_dim": 12}

SHAPES = {
    "qwen3": FamilyShape("Qwen3ForCausalLM", BASE, prompts=(4, 5, 0, 1)),
    "qwen3-biases-upper-windows-tied": FamilyShape(
        "Qwen3ForCausalLM",
        BASE
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        eos=(3, 90),
        prompts=(0, 1, 2, 3),
    ),
}
