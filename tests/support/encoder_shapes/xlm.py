"""XLM: all heads, learned and sinusoidal positions, all summaries of a text."""

from __future__ import annotations

from typing import Any

from support.encoder_shape import MAX_POSITIONS, EncoderShape

BASE: dict[str, Any] = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": MAX_POSITIONS}
OTHER = BASE | {
    "emb_dim": 24,
    "n_layers": 3,
    "n_heads": 2,
    "gelu_activation": False,
    "sinusoidal_embeddings": True,
    "layer_norm_eps": 1e-6,
    "n_langs": 3,
}

SHAPES = {
    "xlm": EncoderShape("XLMModel", BASE),
    "xlm-sinusoidal": EncoderShape("XLMModel", OTHER, seed=1),
    "xlm-masked": EncoderShape("XLMWithLMHeadModel", BASE, seed=2),
    "xlm-masked-untied": EncoderShape("XLMWithLMHeadModel", OTHER | {"tie_word_embeddings": False}, seed=3),
    "xlm-classes": EncoderShape("XLMForSequenceClassification", BASE | {"num_labels": 5}, seed=4),
    "xlm-classes-of-means": EncoderShape(
        "XLMForSequenceClassification",
        OTHER | {"num_labels": 3, "problem_type": "multi_label_classification", "summary_type": "mean"},
        seed=5,
    ),
    "xlm-classes-of-last": EncoderShape(
        "XLMForSequenceClassification", BASE | {"num_labels": 3, "summary_type": "last"}, seed=6
    ),
    "xlm-classes-of-cls-index": EncoderShape(
        "XLMForSequenceClassification", OTHER | {"num_labels": 1, "summary_type": "cls_index"}, seed=7
    ),
    "xlm-tokens": EncoderShape("XLMForTokenClassification", BASE | {"num_labels": 5}, seed=8),
    "xlm-answers": EncoderShape("XLMForQuestionAnsweringSimple", BASE, seed=10),
}
