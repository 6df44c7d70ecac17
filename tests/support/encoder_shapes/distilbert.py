"""DistilBERT: all heads, learned and sinusoidal positions."""

from __future__ import annotations

from typing import Any

from support.encoder_shape import MAX_POSITIONS, EncoderShape

BASE: dict[str, Any] = {
    "dim": 32,
    "hidden_dim": 56,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
NARROW = BASE | {"dim": 24, "n_heads": 2, "n_layers": 3, "activation": "relu", "sinusoidal_pos_embds": True}

SHAPES = {
    "distilbert": EncoderShape("DistilBertModel", BASE),
    "distilbert-sinusoidal": EncoderShape("DistilBertModel", NARROW, seed=1),
    "distilbert-masked": EncoderShape("DistilBertForMaskedLM", BASE, seed=2),
    "distilbert-masked-untied": EncoderShape("DistilBertForMaskedLM", NARROW | {"tie_word_embeddings": False}, seed=3),
    "distilbert-classes": EncoderShape("DistilBertForSequenceClassification", BASE | {"num_labels": 5}, seed=4),
    "distilbert-many-classes": EncoderShape(
        "DistilBertForSequenceClassification",
        NARROW | {"num_labels": 3, "problem_type": "multi_label_classification"},
        seed=5,
    ),
    "distilbert-tokens": EncoderShape("DistilBertForTokenClassification", BASE | {"num_labels": 5}, seed=6),
    "distilbert-answers": EncoderShape("DistilBertForQuestionAnswering", BASE, seed=8),
}
