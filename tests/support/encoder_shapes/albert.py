"""ALBERT: all heads; one group of layers and two, of one layer and two; vectors narrower and as wide as the layers."""

from __future__ import annotations

from typing import Any

from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE as BERT
from support.encoder_shapes.bert import NARROW as NARROW_BERT

BASE: dict[str, Any] = BERT | {"embedding_size": 20, "num_hidden_layers": 3}
NARROW: dict[str, Any] = NARROW_BERT | {
    "embedding_size": 24,
    "num_hidden_layers": 4,
    "num_hidden_groups": 2,
    "inner_group_num": 2,
    "hidden_act": "relu",
    "type_vocab_size": 1,
}

SHAPES = {
    "albert": EncoderShape("AlbertModel", BASE),
    "albert-groups": EncoderShape("AlbertModel", NARROW, seed=1),
    "albert-masked": EncoderShape("AlbertForMaskedLM", BASE | {"type_vocab_size": 3}, seed=2),
    "albert-masked-untied": EncoderShape("AlbertForMaskedLM", NARROW | {"tie_word_embeddings": False}, seed=3),
    "albert-pretraining": EncoderShape("AlbertForPreTraining", BASE, seed=4),
    "albert-classes": EncoderShape("AlbertForSequenceClassification", BASE | {"num_labels": 5}, seed=5),
    "albert-tokens": EncoderShape("AlbertForTokenClassification", BASE | {"num_labels": 5}, seed=7),
    "albert-answers": EncoderShape("AlbertForQuestionAnswering", BASE, seed=9),
}
