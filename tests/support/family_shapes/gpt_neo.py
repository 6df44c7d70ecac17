"""GPT-Neo: layers that see a window, in turns with others; scores that are not scaled."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 12,
    "max_position_embeddings": 128,
}

SHAPES = {
    "gpt-neo": FamilyShape("GPTNeoForCausalLM", BASE, seed=1, eos_gain=1.4, prompts=(0, 3, 8, 1)),
    "gpt-neo-local-untied": FamilyShape(
        "GPTNeoForCausalLM",
        BASE
        | {
            "num_layers": 3,
            "attention_types": [[["local"], 2], [["global"], 1]],
            "window_size": 5,
            "intermediate_size": 56,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
        eos=(3, 90),
        prompts=(0, 1, 10, 2),
    ),
}
