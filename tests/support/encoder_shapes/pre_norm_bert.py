"""MegatronBERT, XLM-R XL and RoBERTa-PreLayerNorm: all heads, with segments and without, tied and untied matrices."""

from __future__ import annotations

from support.encoder_shape import EncoderShape
from support.encoder_shapes import bert, roberta

MEGATRON = {
    "Model": (bert.BASE, bert.NARROW | {"hidden_act": "relu", "type_vocab_size": 1}),
    "ForMaskedLM": (bert.BASE | {"type_vocab_size": 3}, bert.NARROW | {"tie_word_embeddings": False}),
    "ForPreTraining": (bert.NARROW,),
    "ForSequenceClassification": (bert.BASE | {"num_labels": 5}, bert.NARROW | {"num_labels": 1}),
    "ForTokenClassification": (bert.BASE | {"num_labels": 5},),
}
OTHERS = {
    "Model": (roberta.BASE, roberta.NARROW),
    "ForMaskedLM": (roberta.BASE, roberta.NARROW | {"tie_word_embeddings": False}),
    "ForSequenceClassification": (roberta.BASE | {"num_labels": 5}, roberta.NARROW | {"num_labels": 1}),
    "ForTokenClassification": (roberta.BASE | {"num_labels": 5},),
}

SHAPES = {
    f"{name.lower()}-{kind.lower()}-{number}": EncoderShape(f"{name}{kind}", settings, seed=number)
    for name, kinds in (("MegatronBert", MEGATRON), ("XLMRobertaXL", OTHERS), ("RobertaPreLayerNorm", OTHERS))
    for kind, several in kinds.items()
    for number, settings in enumerate(several)
}
