"""Settings of published DeBERTa checkpoints. v3's own config names no architecture; saving the model adds it."""

from __future__ import annotations

from typing import Any

DEBERTA_V3_BASE: dict[str, Any] = {
    "architectures": ["DebertaV2Model"],
    "model_type": "deberta-v2",
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "layer_norm_eps": 1e-7,
    "max_relative_positions": -1,
    "position_biased_input": False,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 0,
    "vocab_size": 128100,
}
DEBERTA_V2_XLARGE_MNLI: dict[str, Any] = DEBERTA_V3_BASE | {
    "architectures": ["DebertaV2ForSequenceClassification"],
    "attention_head_size": 64,
    "conv_act": "gelu",
    "conv_kernel_size": 3,
    "hidden_size": 1536,
    "id2label": {"0": "CONTRADICTION", "1": "NEUTRAL", "2": "ENTAILMENT"},
    "label2id": {"CONTRADICTION": 0, "NEUTRAL": 1, "ENTAILMENT": 2},
    "intermediate_size": 6144,
    "num_attention_heads": 24,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "pooler_dropout": 0,
    "pooler_hidden_act": "gelu",
    "pooler_hidden_size": 1536,
}
