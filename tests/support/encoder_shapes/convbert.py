"""ConvBERT: all heads; kernels of three tokens and of nine; networks in groups and whole; vectors of another width."""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes import bert

BASE = bert.BASE | {"embedding_size": 32}
# Heads are fewer than the ratio here, so one is left.
OTHER = bert.NARROW | {
    "embedding_size": 20,
    "conv_kernel_size": 3,
    "num_groups": 2,
    "head_ratio": 4,
    "hidden_act": "relu",
    "type_vocab_size": 3,
}

SHAPES = {
    "convbert": EncoderShape("ConvBertModel", BASE),
    "convbert-groups": EncoderShape("ConvBertModel", OTHER, seed=1),
    "convbert-masked": EncoderShape("ConvBertForMaskedLM", BASE | {"type_vocab_size": 1}, seed=2),
    "convbert-masked-untied": EncoderShape("ConvBertForMaskedLM", OTHER | {"tie_word_embeddings": False}, seed=3),
    "convbert-classes": EncoderShape("ConvBertForSequenceClassification", BASE | {"num_labels": 5}, seed=4),
    "convbert-tokens": EncoderShape("ConvBertForTokenClassification", BASE | {"num_labels": 5}, seed=6),
}
