"""RoBERTa, XLM-RoBERTa, CamemBERT and Data2Vec: all heads, padding ids among the tokens, which have no position."""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE as BERT
from support.encoder_shapes.bert import NARROW as NARROW_BERT

BASE = BERT | {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
NARROW = NARROW_BERT | {"type_vocab_size": 2, "pad_token_id": 4, "hidden_act": "relu"}

SHAPES = {
    "roberta": EncoderShape("RobertaModel", BASE, vocab=29),
    "roberta-padding-first": EncoderShape("RobertaModel", NARROW | {"pad_token_id": 0}, vocab=29, seed=1),
    "roberta-masked": EncoderShape("RobertaForMaskedLM", BASE, seed=2),
    "roberta-masked-untied": EncoderShape("RobertaForMaskedLM", NARROW | {"tie_word_embeddings": False}, seed=3),
    "roberta-classes": EncoderShape("RobertaForSequenceClassification", BASE | {"num_labels": 5}, seed=4),
    "roberta-tokens": EncoderShape("RobertaForTokenClassification", NARROW | {"num_labels": 3}, seed=5),
    "xlm-roberta": EncoderShape("XLMRobertaModel", NARROW, vocab=29, seed=6),
    "xlm-roberta-masked": EncoderShape("XLMRobertaForMaskedLM", NARROW, seed=7),
    "xlm-roberta-one-class": EncoderShape("XLMRobertaForSequenceClassification", NARROW | {"num_labels": 1}, seed=8),
    "xlm-roberta-tokens": EncoderShape("XLMRobertaForTokenClassification", BASE | {"num_labels": 5}, seed=9),
    "camembert": EncoderShape("CamembertModel", BASE, vocab=29, seed=10),
    "camembert-masked": EncoderShape("CamembertForMaskedLM", BASE, seed=11),
    "camembert-classes": EncoderShape("CamembertForSequenceClassification", NARROW | {"num_labels": 3}, seed=12),
    "camembert-tokens": EncoderShape("CamembertForTokenClassification", BASE | {"num_labels": 5}, seed=13),
    "data2vec": EncoderShape("Data2VecTextModel", NARROW, vocab=29, seed=14),
    "data2vec-masked": EncoderShape("Data2VecTextForMaskedLM", BASE, seed=15),
    "data2vec-classes": EncoderShape("Data2VecTextForSequenceClassification", NARROW | {"num_labels": 3}, seed=16),
    "data2vec-tokens": EncoderShape("Data2VecTextForTokenClassification", BASE | {"num_labels": 5}, seed=17),
    "roberta-answers": EncoderShape("RobertaForQuestionAnswering", BASE, seed=14),
    "xlm-roberta-answers": EncoderShape("XLMRobertaForQuestionAnswering", NARROW, seed=15),
    "camembert-answers": EncoderShape("CamembertForQuestionAnswering", BASE, seed=16),
}
