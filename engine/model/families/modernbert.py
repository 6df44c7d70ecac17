"""ModernBERT: pre-norm encoder, gated GELU, local and global layers with separate theta (arXiv:2412.13663)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, layer_kinds, linear, multi_head, rotary, tokens
from engine.model.families.encoder_only import answer_span
from engine.model.families.names import StackNames, norm_weights, stack_weights
from engine.model.normalisation import Norm
from engine.model.spec import (
    AnswerSpan,
    Block,
    Classifier,
    Gated,
    Head,
    MaskedLm,
    ModelSpec,
    Pool,
    Pre,
    Stack,
)
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    layer_norm = block_norm(config)
    encoder = stack(config, layer_norm, _windows(config), causal=False)
    return ModelSpec(encoder=encoder, decoder=None, head=_head(config, layer_norm))


def block_norm(config: Any) -> Norm:
    """The norm used everywhere."""
    return Norm("layer", config.norm_eps, bias=config.norm_bias)


def stack(config: Any, layer_norm: Norm, windows: Sequence[Window | None], *, causal: bool) -> Stack:
    """The layers, with the window of each, of ModernBERT and of its decoder."""
    head_dim = even_head_dim(config.hidden_size, config.num_attention_heads)
    blocks = tuple(
        Block(
            # The embedding's own norm stands before the first attention.
            placement=Pre(attention=layer_norm if layer else None, ffn=layer_norm),
            attention=multi_head(
                config,
                position=rotary(config, head_dim, layer_type, in_float32=True),
                causal=causal,
                sees=window,
                bias=config.attention_bias,
            ),
            ffn=Gated(config.intermediate_size, activation(config.hidden_activation), bias=config.mlp_bias),
        )
        for layer, (layer_type, window) in enumerate(zip(config.layer_types, windows, strict=True))
    )
    return Stack(
        hidden_size=config.hidden_size,
        embedding=tokens(config, norm=layer_norm),
        blocks=blocks,
        final_norm=layer_norm,
    )


def _windows(config: Any) -> list[Window | None]:
    """The window of each layer: a local one sees half of `local_attention` on either side, and itself."""
    types = layer_kinds(config, "full_attention", "sliding_attention")
    if config.local_attention < 0:
        raise UnsupportedModelError(
            f"local_attention of the config must not be negative, got {config.local_attention}."
        )
    reach = config.local_attention // 2
    return [Window(reach, reach) if layer_type == "sliding_attention" else None for layer_type in types]


def _head(config: Any, layer_norm: Norm) -> Head:
    name = config.architectures[0]
    act = activation(config.classifier_activation)
    if name == "ModernBertForMaskedLM":
        return MaskedLm(
            tied=config.tie_word_embeddings,
            activation=act,
            norm=layer_norm,
            dense_bias=config.classifier_bias,
            bias=config.decoder_bias,
        )
    if name == "ModernBertModel":
        return Pool()
    if name == "ModernBertForQuestionAnswering":
        return answer_span(config, activation=act, norm=layer_norm, dense_bias=config.classifier_bias)
    return Classifier(
        labels=config.num_labels,
        pooling=None if name == "ModernBertForTokenClassification" else config.classifier_pooling,
        activation=act,
        norm=layer_norm,
        dense_bias=config.classifier_bias,
    )


def weights(model: ModelSpec) -> WeightTable:
    entries = stack_weights("encoder", model.trunk, NAMES)
    head, ignored = model.head, []
    match head:
        case MaskedLm(dense_bias=dense_bias) | Classifier(dense_bias=dense_bias) | AnswerSpan(dense_bias=dense_bias):
            entries += linear("head.dense", "head.dense", dense_bias)
            entries += norm_weights("head.norm", "head.norm", model.trunk.final_norm)
        case _:
            ignored = [r"(head|decoder|classifier)\..*"]
    match head:
        case MaskedLm(tied=tied, bias=bias):
            output = linear("head.output", "decoder", bias)
            entries += output[1:] if tied else output
        case Classifier() | AnswerSpan():
            entries += linear("head.output", "classifier", True)
    return WeightTable(tuple(entries), prefix="model.", ignored=tuple(ignored), head="decoder.weight")


# In a fused gate and up matrix, the activated part comes first, as in our own matrix.
NAMES = StackNames(
    tokens="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    final_norm="final_norm",
    qkv="attn.Wqkv",
    out="attn.Wo",
    norms=("attn_norm", "mlp_norm"),
    ffn=("mlp.Wi", "mlp.Wo"),
)


FAMILY = Family(
    name="ModernBERT",
    architectures=(
        "ModernBertForMaskedLM",
        "ModernBertForQuestionAnswering",
        "ModernBertForSequenceClassification",
        "ModernBertForTokenClassification",
        "ModernBertModel",
    ),
    headless=("ModernBertModel",),
    brings="encoder with local and global attention, each with its rotary base",
    spec=spec,
    weights=weights,
)
