"""MPNet: BERT's encoder with a bias by distance that all layers share (arXiv:2004.09297)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation
from engine.model.families.encoder_only import (
    OLD_NORMS,
    LayerNames,
    check_settings,
    positions_after_padding,
    post_norm_encoder,
    stack_weights,
)
from engine.model.families.roberta import head_of, head_weights
from engine.model.normalisation import Norm
from engine.model.positions import RelativeBuckets
from engine.model.spec import Dense, MaskedLm, ModelSpec, Tokens
from engine.model.table import Entry, Family, WeightTable

_PADDING = 1  # whatever pad_token_id says
_BIAS = RelativeBuckets(buckets=32, max_distance=128, bidirectional=True)
_LAYER = LayerNames(
    queries="attention.attn.q",
    keys="attention.attn.k",
    values="attention.attn.v",
    out="attention.attn.o",
    attention_norm="attention.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    ffn_norm="output.LayerNorm",
)


def spec(config: Any) -> ModelSpec:
    check_settings(config)
    if config.relative_attention_num_buckets != _BIAS.buckets:
        raise UnsupportedModelError(
            f"relative_attention_num_buckets of the config must be {_BIAS.buckets}, the number that "
            f"transformers always uses; got {config.relative_attention_num_buckets}."
        )
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    positions = positions_after_padding(config, _PADDING)
    encoder = post_norm_encoder(
        Tokens(vocab_size=config.vocab_size, width=config.hidden_size, positions=positions, norm=layer_norm),
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        ffn=Dense(config.intermediate_size, activation(config.hidden_act), bias=True),
        layer_norm=layer_norm,
        shared_bias=_BIAS,
    )
    return ModelSpec(
        encoder=encoder, decoder=None, head=head_of(config), context_length=positions.size - positions.offset
    )


def weights(model: ModelSpec) -> WeightTable:
    more, ignored = head_weights(model, "mpnet")
    return WeightTable(
        (
            *stack_weights(model, "mpnet", names=_LAYER),
            Entry("encoder.shared_bias.weight", ("mpnet.encoder.relative_attention_bias.weight",), shard_axis=1),
            *more,
        ),
        prefix="mpnet.",
        renamed=OLD_NORMS,
        ignored=ignored,
        head="lm_head.decoder.weight" if isinstance(model.head, MaskedLm) else None,
    )


FAMILY = Family(
    name="MPNet",
    architectures=(
        "MPNetForMaskedLM",
        "MPNetForQuestionAnswering",
        "MPNetForSequenceClassification",
        "MPNetForTokenClassification",
        "MPNetModel",
    ),
    brings="BERT's encoder without segments, relative position buckets",
    spec=spec,
    weights=weights,
)
