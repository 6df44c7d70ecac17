"""ESM: all heads; learned and rotary positions, inputs scaled by their masks or not, vectors with a norm or none."""

from __future__ import annotations

from typing import Any

from support.encoder_shape import EncoderShape
from support.encoder_shapes import bert

COMMON: dict[str, Any] = {"pad_token_id": 1, "mask_token_id": 5}
# As ESM-2; and as ESM-1b, with all switches the other way.
BASE = bert.BASE | COMMON | {"position_embedding_type": "rotary", "token_dropout": True, "rope_theta": 500.0}
OTHER = bert.NARROW | COMMON | {"emb_layer_norm_before": True, "pad_token_id": 4}
MIXED = bert.NARROW | COMMON | {"emb_layer_norm_before": True, "token_dropout": True, "pad_token_id": 0}

SHAPES = {
    "esm": EncoderShape("EsmModel", BASE, vocab=29),
    "esm-learned": EncoderShape("EsmModel", OTHER, vocab=29, seed=1),
    "esm-learned-scaled": EncoderShape("EsmModel", MIXED, vocab=29, seed=2),
    "esm-masked": EncoderShape("EsmForMaskedLM", BASE, vocab=33, seed=3),
    "esm-masked-untied": EncoderShape("EsmForMaskedLM", OTHER | {"tie_word_embeddings": False}, seed=4),
    "esm-classes": EncoderShape("EsmForSequenceClassification", BASE | {"num_labels": 5}, seed=5),
    "esm-tokens": EncoderShape("EsmForTokenClassification", BASE | {"num_labels": 5}, seed=7),
}
