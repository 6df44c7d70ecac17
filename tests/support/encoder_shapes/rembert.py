"""RemBERT: all heads; vectors and the head's features of other widths than the layers, and of theirs."""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE as BERT
from support.encoder_shapes.bert import NARROW as NARROW_BERT

BASE = BERT | {"input_embedding_size": 20, "output_embedding_size": 48}
NARROW = NARROW_BERT | {"input_embedding_size": 24, "output_embedding_size": 12, "hidden_act": "relu"}

SHAPES = {
    "rembert": EncoderShape("RemBertModel", BASE),
    "rembert-narrow": EncoderShape("RemBertModel", NARROW | {"type_vocab_size": 3}, seed=1),
    "rembert-masked": EncoderShape("RemBertForMaskedLM", BASE, seed=2),
    "rembert-masked-narrow": EncoderShape("RemBertForMaskedLM", NARROW | {"tie_word_embeddings": True}, seed=3),
    "rembert-classes": EncoderShape("RemBertForSequenceClassification", BASE | {"num_labels": 5}, seed=4),
    "rembert-tokens": EncoderShape("RemBertForTokenClassification", BASE | {"num_labels": 5}, seed=6),
}
