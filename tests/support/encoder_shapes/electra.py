"""ELECTRA: all heads, with vectors narrower and wider than the hidden states, and as wide."""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE as BERT
from support.encoder_shapes.bert import NARROW as NARROW_BERT

BASE = BERT | {"embedding_size": 20}
NARROW = NARROW_BERT | {"embedding_size": 24, "hidden_act": "relu", "type_vocab_size": 3}
WIDER = NARROW | {"embedding_size": 40}

SHAPES = {
    "electra": EncoderShape("ElectraModel", BASE),
    "electra-as-wide": EncoderShape("ElectraModel", NARROW, seed=1),
    "electra-wider": EncoderShape("ElectraForPreTraining", WIDER, seed=2),
    "electra-masked": EncoderShape("ElectraForMaskedLM", BASE, seed=3),
    "electra-masked-untied": EncoderShape("ElectraForMaskedLM", NARROW | {"tie_word_embeddings": False}, seed=4),
    "electra-classes": EncoderShape("ElectraForSequenceClassification", BASE | {"num_labels": 5}, seed=5),
    "electra-tokens": EncoderShape("ElectraForTokenClassification", BASE | {"num_labels": 5}, seed=7),
    "electra-answers": EncoderShape("ElectraForQuestionAnswering", BASE, seed=9),
}
