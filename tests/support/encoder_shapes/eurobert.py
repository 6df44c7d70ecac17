"""EuroBERT: grouped heads, biases."""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes.bert import BASE

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "mask_token_id": 3}

SHAPES = {
    "eurobert": EncoderShape("EuroBertModel", BASE | IDS | {"num_key_value_heads": 2}),
    "eurobert-biases-own-head-dim": EncoderShape(
        "EuroBertModel",
        BASE | IDS | {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "rms_norm_eps": 1e-3},
        seed=1,
    ),
}
