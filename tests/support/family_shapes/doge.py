"""Doge: values that add to the scores of their keys, factors of residuals."""

from support.family_shape import DECODER, FamilyShape

SHAPES = {
    "doge": FamilyShape("DogeForCausalLM", DECODER, prompts=(0, 3, 1, 2)),
    "doge-odd-biases-tied": FamilyShape(
        "DogeForCausalLM",
        DECODER
        | {
            "hidden_size": 30,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 9,
            "keep_window_size": 100,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        eos_gain=3.2,
        prompts=(5, 20, 0, 1),
    ),
}
