"""Qwen2: biases of query, key and value only; windows in the upper layers."""

from support.family_shape import DECODER, FamilyShape

SHAPES = {
    "qwen2": FamilyShape("Qwen2ForCausalLM", DECODER, prompts=(0, 1, 7, 2)),
    "qwen2-upper-windows-tied": FamilyShape(
        "Qwen2ForCausalLM",
        DECODER
        | {
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        eos=(3, 90),
        prompts=(0, 3, 1, 2),
    ),
}
