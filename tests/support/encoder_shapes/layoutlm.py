"""LayoutLM: all heads over tokens with boxes and without."""

from __future__ import annotations

from typing import Any

from support.encoder_shape import MAX_POSITIONS, EncoderShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "max_2d_position_embeddings": 50,
}
NARROW = BASE | {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_act": "relu",
    "layer_norm_eps": 1e-6,
    "max_2d_position_embeddings": 7,
    "type_vocab_size": 1,
}

SHAPES = {
    "layoutlm": EncoderShape("LayoutLMModel", BASE),
    "layoutlm-narrow": EncoderShape("LayoutLMModel", NARROW, seed=1),
    "layoutlm-masked": EncoderShape("LayoutLMForMaskedLM", BASE, seed=2),
    "layoutlm-masked-untied": EncoderShape("LayoutLMForMaskedLM", NARROW | {"tie_word_embeddings": False}, seed=3),
    "layoutlm-classes": EncoderShape("LayoutLMForSequenceClassification", BASE | {"num_labels": 5}, seed=4),
    "layoutlm-tokens": EncoderShape("LayoutLMForTokenClassification", BASE | {"num_labels": 5}, seed=6),
    "layoutlm-answers": EncoderShape("LayoutLMForQuestionAnswering", BASE, seed=8),
}
