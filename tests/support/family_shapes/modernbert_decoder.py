"""ModernBERT as a decoder: windows in most layers, a rotary base of each kind, a layer before the output matrix."""

from typing import Any

from support.family_shape import FamilyShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "local_attention": 16,
    "cls_token_id": 1,
    "sep_token_id": 7,
}

SHAPES = {
    "modernbert-decoder": FamilyShape("ModernBertDecoderForCausalLM", BASE, prompts=(0, 2, 3, 1)),
    "modernbert-decoder-biases-untied": FamilyShape(
        "ModernBertDecoderForCausalLM",
        BASE
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "num_hidden_layers": 2,
            "local_attention": 24,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
            "classifier_activation": "relu",
            "hidden_activation": "silu",
            "tie_word_embeddings": False,
        },
        eos=(3, 90),
        eos_gain=2.6,
        prompts=(0, 1, 2, 3),
    ),
}
