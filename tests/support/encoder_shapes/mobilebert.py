"""MobileBERT: all heads; values from within the bottleneck and outside; vectors of three tokens, of one, as they are;
one feed-forward network and three; a classifier without its dense layer."""

from __future__ import annotations

from typing import Any

from support.encoder_shape import EncoderShape
from support.encoder_shapes import bert

BASE: dict[str, Any] = bert.BASE | {
    "embedding_size": 12,
    "intra_bottleneck_size": 16,
    "num_feedforward_networks": 3,
}
OTHER: dict[str, Any] = bert.NARROW | {
    "num_hidden_layers": 2,
    "embedding_size": 20,
    "intra_bottleneck_size": 16,
    "num_feedforward_networks": 1,
    "use_bottleneck_attention": True,
    "trigram_input": False,
    "classifier_activation": False,
    "hidden_act": "gelu",
    "type_vocab_size": 1,
}
WIDE: dict[str, Any] = OTHER | {"embedding_size": 24, "use_bottleneck_attention": False, "classifier_activation": True}
UNTIED = {"tie_word_embeddings": False}

SHAPES = {
    "mobilebert": EncoderShape("MobileBertModel", BASE),
    "mobilebert-inside": EncoderShape("MobileBertModel", OTHER, seed=1),
    "mobilebert-wide": EncoderShape("MobileBertModel", WIDE, seed=2),
    "mobilebert-masked": EncoderShape("MobileBertForMaskedLM", BASE | {"type_vocab_size": 3}, seed=3),
    "mobilebert-masked-untied": EncoderShape("MobileBertForMaskedLM", OTHER | UNTIED, seed=15),
    "mobilebert-masked-wide": EncoderShape("MobileBertForMaskedLM", WIDE, seed=5),
    "mobilebert-pretraining": EncoderShape("MobileBertForPreTraining", BASE, seed=6),
    "mobilebert-classes": EncoderShape("MobileBertForSequenceClassification", BASE | {"num_labels": 5}, seed=7),
    # Without norms the numbers are large, and what sigmoid makes of them says little.
    "mobilebert-numbers": EncoderShape(
        "MobileBertForSequenceClassification", OTHER | {"num_labels": 2, "problem_type": "regression"}, seed=8
    ),
    "mobilebert-tokens": EncoderShape("MobileBertForTokenClassification", BASE | {"num_labels": 5}, seed=9),
    "mobilebert-tokens-wide": EncoderShape("MobileBertForTokenClassification", WIDE | {"num_labels": 3}, seed=10),
}
