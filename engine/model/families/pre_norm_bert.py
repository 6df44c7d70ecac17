"""MegatronBERT, XLM-R XL and RoBERTa-PreLayerNorm: encoders of BERT's and RoBERTa's parts with norms before sublayers
(arXiv:1909.08053, arXiv:2105.00572)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families import bert, roberta
from engine.model.families.common import norm
from engine.model.families.encoder_only import BERT_LAYER, positions_after_padding, pre_norm, stack_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import MaskedLm, ModelSpec, Tokens
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    megatron = config.model_type == "megatron-bert"
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    positions = (
        Learned(config.max_position_embeddings) if megatron else positions_after_padding(config, config.pad_token_id)
    )
    encoder = pre_norm(bert.stack(config, positions), layer_norm)
    assert isinstance(encoder.embedding, Tokens)
    if config.model_type != "roberta-prelayernorm":
        encoder = replace(encoder, embedding=replace(encoder.embedding, norm=None))
    return ModelSpec(
        encoder=encoder,
        decoder=None,
        head=bert.head_of(config) if megatron else roberta.head_of(config),
        context_length=positions.size - positions.offset,
    )


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Tokens)
    embedding = model.encoder.embedding
    if embedding.norm is not None:
        source, last = "roberta_prelayernorm", "roberta_prelayernorm.LayerNorm"
        names = replace(BERT_LAYER, attention_norm="attention.LayerNorm", ffn_norm="intermediate.LayerNorm")
    elif isinstance(embedding.positions, Learned) and embedding.positions.unplaced is not None:
        source, last = "roberta", "roberta.encoder.LayerNorm"
        names = replace(BERT_LAYER, attention_norm="attention.self_attn_layer_norm", ffn_norm="LayerNorm")
    else:
        source, last = "bert", "bert.encoder.ln"
        names = replace(BERT_LAYER, attention_norm="attention.ln", ffn_norm="ln")
    entries = [*stack_weights(model, source, names=names), *norm("encoder.final_norm", last, bias=True)]
    more, ignored = (bert if source == "bert" else roberta).head_weights(model, source)
    tables = rf"{source}\.embeddings\.((position|token_type)_ids|token_type_embeddings\.weight)"
    masked = {"bert": bert.masked_table(model)}.get(source, "lm_head.decoder.weight")
    return WeightTable(
        tuple(entries + more),
        prefix=f"{source}.",
        ignored=(*ignored, tables),
        head=masked if isinstance(model.head, MaskedLm) else None,
    )


FAMILY = Family(
    name="MegatronBERT, XLM-R XL and RoBERTa-PreLayerNorm",
    architectures=(
        *(f"MegatronBert{kind}" for kind in bert.KINDS),
        *(f"{name}{kind}" for name in ("XLMRobertaXL", "RobertaPreLayerNorm") for kind in roberta.KINDS),
    ),
    brings="BERT's encoder with norms before sublayers",
    spec=spec,
    weights=weights,
)
