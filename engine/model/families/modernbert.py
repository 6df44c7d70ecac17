"""ModernBERT: pre-norm encoder, gated GELU, local and global layers with a theta each (arXiv:2412.13663)."""

from __future__ import annotations

from typing import Any

from engine.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, rotary
from engine.model.spec import (
    Attention,
    Block,
    Classifier,
    Gated,
    Head,
    MaskedLm,
    ModelSpec,
    Norm,
    Pool,
    Pre,
    Stack,
    Tokens,
)
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    norm = Norm("layer", config.norm_eps, bias=config.norm_bias)
    head_dim = config.hidden_size // config.num_attention_heads
    blocks = []
    for layer, layer_type in enumerate(config.layer_types):
        reach = config.local_attention // 2
        attention = Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim, layer_type),
            causal=False,
            window=Window(reach, reach) if layer_type == "sliding_attention" else None,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
        )
        blocks.append(
            Block(
                # The embedding's own norm stands before the first attention.
                placement=Pre(attention=norm if layer else None, ffn=norm),
                attention=attention,
                ffn=Gated(config.intermediate_size, activation(config.hidden_activation), bias=config.mlp_bias),
            )
        )
    encoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size, norm=norm),
        blocks=tuple(blocks),
        final_norm=norm,
    )
    return ModelSpec(encoder=encoder, decoder=None, head=_head(config, norm))


def _head(config: Any, norm: Norm) -> Head:
    name = config.architectures[0] if config.architectures else "ModernBertModel"
    act = activation(config.classifier_activation)
    match name:
        case "ModernBertModel":
            return Pool()
        case "ModernBertForMaskedLM":
            return MaskedLm(
                tied=config.tie_word_embeddings,
                activation=act,
                norm=norm,
                dense_bias=config.classifier_bias,
                bias=config.decoder_bias,
            )
        case "ModernBertForSequenceClassification":
            return Classifier(
                labels=config.num_labels,
                pooling=config.classifier_pooling,
                activation=act,
                norm=norm,
                dense_bias=config.classifier_bias,
            )
        case _:
            raise UnsupportedModelError(f"ModernBERT has no head named {name!r} here.")


FAMILY = Family(
    name="ModernBERT",
    architectures=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    brings="encoder, local and global attention with a rotary base each",
    spec=spec,
)
