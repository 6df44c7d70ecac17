"""Jina v2: all heads, heads a power of two and not, gates of GELU and of ReLU, tied and untied matrices."""

from __future__ import annotations

from typing import Any

from support.encoder_shape import EncoderShape
from support.encoder_shapes import bert

COMMON: dict[str, Any] = {"position_embedding_type": "alibi", "feed_forward_type": "geglu"}
BASE = bert.BASE | COMMON
OTHER = bert.NARROW | COMMON | {"num_attention_heads": 6, "feed_forward_type": "reglu", "type_vocab_size": 3}

SHAPES = {
    "jina-v2": EncoderShape("JinaBertModel", BASE),
    "jina-v2-six-heads": EncoderShape("JinaBertModel", OTHER, seed=1),
    "jina-v2-masked": EncoderShape("JinaBertForMaskedLM", BASE, seed=2),
    "jina-v2-masked-untied": EncoderShape("JinaBertForMaskedLM", OTHER | {"tie_word_embeddings": False}, seed=3),
    "jina-v2-classes": EncoderShape("JinaBertForSequenceClassification", BASE | {"num_labels": 5}, seed=4),
    "jina-v2-tokens": EncoderShape("JinaBertForTokenClassification", BASE | {"num_labels": 5}, seed=6),
}
