"""MPNet: all heads; inputs go beyond the last bucket of distances, and hold padding ids."""

from __future__ import annotations

from support.encoder_shape import MAX_POSITIONS, EncoderShape
from support.encoder_shapes.bert import BASE as BERT

BASE = {name: value for name, value in BERT.items() if name != "type_vocab_size"}
NARROW = BASE | {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "layer_norm_eps": 1e-5,
    "hidden_act": "relu",
    "max_position_embeddings": MAX_POSITIONS - 20,
}

SHAPES = {
    "mpnet": EncoderShape("MPNetModel", BASE, vocab=29),
    "mpnet-narrow": EncoderShape("MPNetModel", NARROW, vocab=29, seed=1),
    "mpnet-masked": EncoderShape("MPNetForMaskedLM", BASE, seed=2),
    "mpnet-masked-untied": EncoderShape("MPNetForMaskedLM", NARROW | {"tie_word_embeddings": False}, seed=3),
    "mpnet-classes": EncoderShape("MPNetForSequenceClassification", BASE | {"num_labels": 5}, seed=4),
    "mpnet-tokens": EncoderShape("MPNetForTokenClassification", BASE | {"num_labels": 5}, seed=6),
    "mpnet-answers": EncoderShape("MPNetForQuestionAnswering", BASE, seed=8),
}
