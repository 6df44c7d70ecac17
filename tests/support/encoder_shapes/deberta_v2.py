"""DeBERTa-v2 as its published checkpoints are (v2 with the convolution, v3), and every switch of its attention and
its embedding; all heads, in either layout of the masked-language-model head.

The inputs are longer than the distances that have a bucket, or a vector, of their own.
"""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE as BERT
from support.encoder_shapes.bert import NARROW as NARROW_BERT

V3 = BERT | {
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "position_buckets": 32,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}
V2 = V3 | {"conv_kernel_size": 3, "conv_act": "gelu"}
# No sharing, no buckets, no norm of the table; positions, segments and a narrower table that is projected.
OWN = NARROW_BERT | {
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "max_relative_positions": 50,
    "type_vocab_size": 2,
    "embedding_size": 20,
}
PLAIN = BERT | {"relative_attention": False, "pos_att_type": "none", "type_vocab_size": 3}
SEQUENCE, TOKENS = "DebertaV2ForSequenceClassification", "DebertaV2ForTokenClassification"

SHAPES = {
    "deberta-v3": EncoderShape("DebertaV2Model", V3),
    "deberta-v2": EncoderShape("DebertaV2Model", V2, seed=1),
    "deberta-own": EncoderShape("DebertaV2Model", OWN, seed=2),
    "deberta-c2p": EncoderShape("DebertaV2Model", V3 | {"pos_att_type": "c2p"}, seed=3),
    "deberta-p2c": EncoderShape("DebertaV2Model", V3 | {"pos_att_type": "p2c"}, seed=4),
    "deberta-own-c2p": EncoderShape("DebertaV2Model", OWN | {"pos_att_type": ["c2p"], "position_buckets": 9}, seed=5),
    "deberta-own-p2c": EncoderShape("DebertaV2Model", OWN | {"pos_att_type": ["p2c"], "position_buckets": 64}, seed=6),
    "deberta-no-terms": EncoderShape("DebertaV2Model", V2 | {"pos_att_type": None}, seed=7),
    "deberta-not-relative": EncoderShape("DebertaV2Model", PLAIN, seed=8),
    # Its scores are scaled for terms that they do not have.
    "deberta-not-relative-scaled": EncoderShape(
        "DebertaV2Model", V3 | {"relative_attention": False, "position_biased_input": True}, seed=9
    ),
    "deberta-grouped-convolution": EncoderShape(
        "DebertaV2Model", OWN | {"conv_kernel_size": 5, "conv_groups": 4}, seed=10
    ),
    "deberta-buckets-beyond-distances": EncoderShape(
        "DebertaV2Model", V3 | {"position_buckets": 128, "max_relative_positions": 40}, seed=11
    ),
    "deberta-masked": EncoderShape("DebertaV2ForMaskedLM", V2, seed=12),
    "deberta-masked-narrow-table": EncoderShape("DebertaV2ForMaskedLM", OWN, vocab=83, seed=13),
    "deberta-masked-untied": EncoderShape("DebertaV2ForMaskedLM", OWN | {"tie_word_embeddings": False}, seed=14),
    "deberta-masked-newer": EncoderShape(
        "DebertaV2ForMaskedLM", V3 | {"legacy": False, "hidden_act": "gelu_new"}, seed=15
    ),
    "deberta-masked-newer-said-untied": EncoderShape(
        "DebertaV2ForMaskedLM", V3 | {"legacy": False, "tie_word_embeddings": False}, seed=16
    ),
    "deberta-classes": EncoderShape(SEQUENCE, V3 | {"num_labels": 3}, seed=17),
    "deberta-tokens": EncoderShape(TOKENS, V3 | {"num_labels": 7}, seed=19),
    "deberta-answers": EncoderShape("DebertaV2ForQuestionAnswering", V3, seed=21),
}
