"""ModernBERT: all heads, windows from a token's neighbours to 128 tokens, with norms and biases and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.encoder_shape import MAX_POSITIONS, EncoderShape

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "local_attention": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
# A window of an odd size is one of the even size below, and one more token: the token itself.
BIASED = BASE | {
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_size": 24,
    "hidden_activation": "silu",
    "classifier_activation": "gelu_new",
    "norm_eps": 1e-3,
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "classifier_bias": True,
    "local_attention": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 2.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}


def as_published(folder: Path) -> None:
    """The config as the first checkpoints have it: the pattern of layers by a number, a theta for each kind."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    settings = config.pop("rope_parameters")
    assert config.pop("layer_types") == ["full_attention", "sliding_attention"] * 2
    config |= {
        "global_attn_every_n_layers": 2,
        "global_rope_theta": settings["full_attention"]["rope_theta"],
        "local_rope_theta": settings["sliding_attention"]["rope_theta"],
        "position_embedding_type": "absolute",
        "reference_compile": True,
        "layer_norm_eps": 1e-5,
    }
    path.write_text(json.dumps(config), encoding="utf-8")


PUBLISHED = BASE | {"global_attn_every_n_layers": 2, "global_rope_theta": 1600.0, "local_rope_theta": 90.0}

SHAPES = {
    "modernbert": EncoderShape("ModernBertModel", BASE | {"local_attention": 128}),
    "modernbert-biased": EncoderShape("ModernBertModel", BIASED, seed=1),
    "modernbert-masked-published": EncoderShape("ModernBertForMaskedLM", PUBLISHED, seed=2, finish=as_published),
    "modernbert-masked-biased-untied": EncoderShape(
        "ModernBertForMaskedLM",
        BIASED | {"tie_word_embeddings": False, "decoder_bias": False, "sparse_prediction": True},
        vocab=83,
        seed=3,
    ),
    "modernbert-classes": EncoderShape("ModernBertForSequenceClassification", BASE | {"num_labels": 5}, seed=4),
    "modernbert-classes-by-mean": EncoderShape(
        "ModernBertForSequenceClassification",
        BIASED | {"num_labels": 3, "classifier_pooling": "mean"},
        seed=5,
    ),
    "modernbert-one-class-published": EncoderShape(
        "ModernBertForSequenceClassification",
        PUBLISHED | {"num_labels": 1, "classifier_pooling": "mean"},
        seed=6,
        finish=as_published,
    ),
    "modernbert-tokens": EncoderShape("ModernBertForTokenClassification", BASE | {"num_labels": 7}, seed=7),
    "modernbert-answers": EncoderShape("ModernBertForQuestionAnswering", BASE, seed=9),
}
