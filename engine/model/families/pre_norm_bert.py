"""MegatronBERT, XLM-R XL and RoBERTa-PreLayerNorm: encoders with parts of BERT and RoBERTa, and norms before sublayers
(arXiv:1909.08053, arXiv:2105.00572)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families.encoder import (
    BERT_LAYER,
    KINDS,
    PRETRAINED,
    EncoderNames,
    encoder_table,
    of,
    roberta_heads,
)
from engine.model.families.encoder_only import bert_head, bert_stack, positions_after_padding, pre_norm, roberta_head
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import ModelSpec, Tokens
from engine.model.table import Family, WeightTable


def _spec(config: Any) -> ModelSpec:
    megatron = config.model_type == "megatron-bert"
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    positions = (
        Learned(config.max_position_embeddings) if megatron else positions_after_padding(config, config.pad_token_id)
    )
    encoder = pre_norm(bert_stack(config, positions), layer_norm)
    assert isinstance(encoder.embedding, Tokens)
    if config.model_type != "roberta-prelayernorm":
        encoder = replace(encoder, embedding=replace(encoder.embedding, norm=None))
    return ModelSpec(
        encoder=encoder,
        decoder=None,
        head=bert_head(config) if megatron else roberta_head(config),
        context_length=positions.size - positions.offset,
    )


MEGATRON = EncoderNames(
    stem="bert",
    layer=replace(BERT_LAYER, norms=("attention.ln", "ln")),
    final_norm="encoder.ln",
    renamed=(),
)
XLMR_XL = EncoderNames(
    stem="roberta",
    layer=replace(BERT_LAYER, norms=("attention.self_attn_layer_norm", "LayerNorm")),
    final_norm="encoder.LayerNorm",
    heads=roberta_heads("roberta"),
    renamed=(),
)
PRE_LAYER_NORM = EncoderNames(
    stem="roberta_prelayernorm",
    layer=replace(BERT_LAYER, norms=("attention.LayerNorm", "intermediate.LayerNorm")),
    final_norm="LayerNorm",
    heads=roberta_heads("roberta_prelayernorm"),
    renamed=(),
)


def _weights(model: ModelSpec) -> WeightTable:
    assert isinstance(model.trunk.embedding, Tokens)
    embedding = model.trunk.embedding
    if embedding.norm is not None:
        return encoder_table(model, PRE_LAYER_NORM)
    from_padding = isinstance(embedding.positions, Learned) and embedding.positions.unplaced is not None
    return encoder_table(model, XLMR_XL if from_padding else MEGATRON)


FAMILY = Family(
    name="MegatronBERT, XLM-R XL and RoBERTa-PreLayerNorm",
    architectures=(*of(PRETRAINED, "MegatronBert"), *of(KINDS, "XLMRobertaXL", "RobertaPreLayerNorm")),
    brings="BERT's encoder with norms before sublayers",
    spec=_spec,
    weights=_weights,
)
