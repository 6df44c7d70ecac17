"""Gemma 3's text model as an encoder: attention to both sides, in windows and without."""

from __future__ import annotations

from typing import Any

from support.encoder_shape import MAX_POSITIONS, EncoderShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "query_pre_attn_scalar": 10,
    "use_bidirectional_attention": True,
    "sliding_window": 18,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

SHAPES = {
    "gemma3-both-sides": EncoderShape("Gemma3TextModel", BASE),
    "gemma3-both-sides-untied": EncoderShape(
        "Gemma3TextModel",
        BASE | {"num_key_value_heads": 1, "sliding_window": 128, "tie_word_embeddings": False, "attention_bias": True},
        seed=1,
    ),
    "gemma3-both-sides-classes": EncoderShape(
        "Gemma3TextForSequenceClassification", BASE | {"num_labels": 3, "sliding_window": 5}, seed=2
    ),
}
