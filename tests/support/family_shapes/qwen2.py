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
    "qwen2-alternating-windows-yarn": FamilyShape(
        "Qwen2ForCausalLM",
        DECODER
        | {
            "num_hidden_layers": 3,
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": 10,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        prompts=(3, 4, 1, 0),
    ),
}
