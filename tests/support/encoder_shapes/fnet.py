"""FNet: all heads; segments; activations; tied and untied output matrices."""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes import bert

# The reference's config has no heads.
BASE, NARROW = ({k: v for k, v in one.items() if k != "num_attention_heads"} for one in (bert.BASE, bert.NARROW))
OTHER = NARROW | {"hidden_act": "relu", "type_vocab_size": 1}

SHAPES = {
    "fnet": EncoderShape("FNetModel", BASE),
    "fnet-narrow": EncoderShape("FNetModel", OTHER, seed=1),
    "fnet-masked": EncoderShape("FNetForMaskedLM", BASE | {"type_vocab_size": 2}, seed=2),
    "fnet-masked-untied": EncoderShape("FNetForMaskedLM", OTHER | {"tie_word_embeddings": False}, seed=3),
    "fnet-pretraining": EncoderShape("FNetForPreTraining", BASE, seed=4),
    "fnet-classes": EncoderShape("FNetForSequenceClassification", BASE | {"num_labels": 5}, seed=5),
    "fnet-tokens": EncoderShape("FNetForTokenClassification", BASE | {"num_labels": 5}, seed=7),
}
