"""RoFormer: all heads; vectors as wide as the layers and narrower; activations; tied and untied matrices."""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE
from support.encoder_shapes.bert import NARROW as NARROW_BERT

NARROW = NARROW_BERT | {"embedding_size": 20, "hidden_act": "relu", "type_vocab_size": 3}

SHAPES = {
    "roformer": EncoderShape("RoFormerModel", BASE),
    "roformer-narrow": EncoderShape("RoFormerModel", NARROW, seed=1),
    "roformer-masked": EncoderShape("RoFormerForMaskedLM", BASE | {"type_vocab_size": 1}, seed=2),
    "roformer-masked-untied": EncoderShape("RoFormerForMaskedLM", NARROW | {"tie_word_embeddings": False}, seed=3),
    "roformer-classes": EncoderShape("RoFormerForSequenceClassification", BASE | {"num_labels": 5}, seed=4),
    "roformer-tokens": EncoderShape("RoFormerForTokenClassification", BASE | {"num_labels": 5}, seed=6),
}
