"""ModernBERT: pre-norm encoder, gated GELU, local and global layers with a theta each (arXiv:2412.13663)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, linear, norm, rotary
from engine.model.families.encoder_only import answer_span
from engine.model.normalisation import Norm
from engine.model.spec import (
    AnswerSpan,
    Attention,
    Block,
    Classifier,
    Gated,
    Head,
    MaskedLm,
    ModelSpec,
    Pool,
    Pre,
    Stack,
    Tokens,
)
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    layer_norm = block_norm(config)
    encoder = stack(config, layer_norm, _windows(config), causal=False)
    return ModelSpec(encoder=encoder, decoder=None, head=_head(config, layer_norm))


def block_norm(config: Any) -> Norm:
    """The norm of all places."""
    return Norm("layer", config.norm_eps, bias=config.norm_bias)


def stack(config: Any, layer_norm: Norm, windows: Sequence[Window | None], *, causal: bool) -> Stack:
    """The layers, with the window of each, of ModernBERT and of its decoder."""
    heads = config.num_attention_heads
    head_dim = even_head_dim(config.hidden_size, heads)
    blocks = tuple(
        Block(
            # The embedding's own norm stands before the first attention.
            placement=Pre(attention=layer_norm if layer else None, ffn=layer_norm),
            attention=Attention(
                heads=heads,
                kv_heads=heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                position=rotary(config, head_dim, layer_type, in_float32=True),
                causal=causal,
                window=window,
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
            ),
            ffn=Gated(config.intermediate_size, activation(config.hidden_activation), bias=config.mlp_bias),
        )
        for layer, (layer_type, window) in enumerate(zip(config.layer_types, windows, strict=True))
    )
    return Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size, norm=layer_norm),
        blocks=blocks,
        final_norm=layer_norm,
    )


def _windows(config: Any) -> list[Window | None]:
    """The window of each layer: a local one sees half of `local_attention` to either side, and itself."""
    types = config.layer_types
    if len(types) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer_types in the checkpoint's config must have one entry for each of num_hidden_layers "
            f"{config.num_hidden_layers}, but has {len(types)}."
        )
    if others := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise UnsupportedModelError(
            f"layer_types of the config holds {others[0]!r}; implemented: full_attention, sliding_attention."
        )
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
    assert model.encoder is not None
    norm_bias = has_norm_bias(model.encoder)
    entries = stack_weights("encoder", model.encoder, _fused)
    head, ignored = model.head, []
    match head:
        case MaskedLm(dense_bias=dense_bias) | Classifier(dense_bias=dense_bias) | AnswerSpan(dense_bias=dense_bias):
            entries += linear("head.dense", "head.dense", dense_bias, 0)
            entries += norm("head.norm", "head.norm", bias=norm_bias)
        case _:
            ignored = [r"(head|decoder|classifier)\..*"]
    match head:
        case MaskedLm(tied=tied, bias=bias):
            output = linear("head.output", "decoder", bias, 0)
            entries += output[1:] if tied else output
        case Classifier() | AnswerSpan():
            entries += linear("head.output", "classifier", True, 0)
    return WeightTable(tuple(entries), prefix="model.", ignored=tuple(ignored), head="decoder.weight")


def _fused(target: str, source: str, part: Attention) -> list[Entry]:
    return linear(target, f"{source}.Wqkv", part.qkv_bias, 0)


def stack_weights(
    side: str, layers: Stack, projections: Callable[[str, str, Attention], Iterable[Entry]]
) -> list[Entry]:
    """The weights of all but the head.

    Args:
        side: `encoder` or `decoder`, as the parameters' names begin.
        projections: gives, of the parameter's name, the name of an attention's module and the attention, what is read
            of queries, keys and values.
    """
    norm_bias = has_norm_bias(layers)
    entries = [
        Entry(f"{side}.embedding.tokens", ("model.embeddings.tok_embeddings.weight",), shard_axis=0),
        *norm(f"{side}.embedding.norm", "model.embeddings.norm", bias=norm_bias),
        *norm(f"{side}.final_norm", "model.final_norm", bias=norm_bias),
    ]
    for i, block in enumerate(layers.blocks):
        target, source = f"{side}.blocks.{i}", f"model.layers.{i}"
        part = block.attention
        assert isinstance(block.placement, Pre)
        assert isinstance(block.ffn, Gated)
        if block.placement.attention is not None:
            entries += norm(f"{target}.attention.before", f"{source}.attn_norm", bias=norm_bias)
        entries += [
            *projections(f"{target}.attention.inner.qkv", f"{source}.attn", part),
            *linear(f"{target}.attention.inner.out", f"{source}.attn.Wo", part.out_bias, 1),
            *norm(f"{target}.ffn.before", f"{source}.mlp_norm", bias=norm_bias),
            # What is activated comes first, as in our own matrix.
            *linear(f"{target}.ffn.inner.gate_up", f"{source}.mlp.Wi", block.ffn.bias, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.Wo", block.ffn.bias, 1),
        ]
    return entries


def has_norm_bias(layers: Stack) -> bool:
    assert layers.final_norm is not None
    return layers.final_norm.bias


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
