"""DeBERTa's first version: its terms, distances and embeddings in all settings; all heads, in either layout of the
masked-language-model head.

The inputs are longer than the distances that have a vector of their own.
"""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE as BERT
from support.encoder_shapes.bert import NARROW as NARROW_BERT

BASE = BERT | {
    "relative_attention": True,
    "pos_att_type": "c2p|p2c",
    "max_relative_positions": -1,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}
NARROW = NARROW_BERT | {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "max_relative_positions": 50,
    "type_vocab_size": 2,
    "embedding_size": 20,
}
SEQUENCE, TOKENS = "DebertaForSequenceClassification", "DebertaForTokenClassification"
ANSWERS = "DebertaForQuestionAnswering"

SHAPES = {
    "deberta-1": EncoderShape("DebertaModel", BASE),
    "deberta-1-narrow": EncoderShape("DebertaModel", NARROW, seed=1),
    "deberta-1-c2p": EncoderShape("DebertaModel", NARROW | {"pos_att_type": ["c2p"]}, seed=2),
    "deberta-1-p2c": EncoderShape("DebertaModel", BASE | {"pos_att_type": "p2c"}, seed=3),
    "deberta-1-more-terms": EncoderShape("DebertaModel", BASE | {"pos_att_type": "c2p|p2c|p2p"}, seed=4),
    "deberta-1-no-terms": EncoderShape("DebertaModel", NARROW | {"pos_att_type": None}, seed=5),
    "deberta-1-not-relative": EncoderShape("DebertaModel", NARROW | {"relative_attention": False}, seed=6),
    "deberta-1-masked": EncoderShape("DebertaForMaskedLM", BASE, seed=7),
    "deberta-1-masked-untied": EncoderShape("DebertaForMaskedLM", NARROW | {"tie_word_embeddings": False}, seed=8),
    "deberta-1-masked-newer": EncoderShape("DebertaForMaskedLM", BASE | {"legacy": False}, seed=9),
    "deberta-1-classes": EncoderShape(SEQUENCE, BASE | {"num_labels": 3}, seed=10),
    "deberta-1-tokens": EncoderShape(TOKENS, BASE | {"num_labels": 5}, seed=12),
    "deberta-1-answers": EncoderShape(ANSWERS, BASE, seed=14),
}
