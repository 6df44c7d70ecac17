"""BERT and ERNIE: all heads, with two segments, one and three, and tasks; activations; tied and untied matrices."""

from __future__ import annotations

from typing import Any

from support.encoder_shape import MAX_POSITIONS, EncoderShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
NARROW = BASE | {"num_attention_heads": 2, "hidden_size": 24, "num_hidden_layers": 3, "layer_norm_eps": 1e-3}

SHAPES = {
    "bert": EncoderShape("BertModel", BASE),
    "bert-narrow-relu": EncoderShape("BertModel", NARROW | {"hidden_act": "relu", "type_vocab_size": 1}, seed=1),
    "bert-masked": EncoderShape("BertForMaskedLM", BASE | {"type_vocab_size": 3}, seed=2),
    "bert-masked-untied": EncoderShape(
        "BertForMaskedLM", NARROW | {"tie_word_embeddings": False, "hidden_act": "gelu_new"}, seed=3
    ),
    "bert-pretraining": EncoderShape("BertForPreTraining", NARROW, seed=4),
    "bert-classes": EncoderShape("BertForSequenceClassification", BASE | {"num_labels": 5}, seed=5),
    "bert-one-class": EncoderShape("BertForSequenceClassification", NARROW | {"num_labels": 1}, seed=6),
    "bert-many-classes": EncoderShape(
        "BertForSequenceClassification", BASE | {"num_labels": 5, "problem_type": "multi_label_classification"}, seed=7
    ),
    "bert-regression": EncoderShape(
        "BertForSequenceClassification", NARROW | {"num_labels": 3, "problem_type": "regression"}, seed=8
    ),
    "bert-tokens": EncoderShape("BertForTokenClassification", BASE | {"num_labels": 5}, seed=9),
    "ernie": EncoderShape("ErnieModel", BASE, seed=11),
    "ernie-tasks": EncoderShape(
        "ErnieModel", NARROW | {"use_task_id": True, "task_type_vocab_size": 4, "type_vocab_size": 4}, seed=12
    ),
    "ernie-masked": EncoderShape("ErnieForMaskedLM", BASE | {"use_task_id": True}, seed=13),
    "ernie-pretraining": EncoderShape("ErnieForPreTraining", NARROW | {"use_task_id": True}, seed=14),
    "ernie-classes": EncoderShape(
        "ErnieForSequenceClassification", BASE | {"use_task_id": True, "num_labels": 5}, seed=15
    ),
    "ernie-tokens": EncoderShape("ErnieForTokenClassification", NARROW | {"num_labels": 3}, seed=16),
    "ernie-answers": EncoderShape("ErnieForQuestionAnswering", NARROW | {"use_task_id": True}, seed=17),
    "bert-answers": EncoderShape("BertForQuestionAnswering", BASE, seed=11),
}
