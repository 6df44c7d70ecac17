"""ModernBERT as a decoder (Ettin): ModernBERT's blocks over earlier tokens only, a layer before the output matrix
(arXiv:2507.11412)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, layer_windows, linear, norm, qkv, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Gated, HeadLayer, Lm, ModelSpec, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    name = config.architectures[0]
    if name.endswith("ForSequenceClassification"):
        raise UnsupportedModelError(f"{name} is not supported: no part has its layer before the scores of classes.")
    layer_norm = Norm("layer", config.norm_eps, bias=config.norm_bias)
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
                window=window,
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
            ),
            ffn=Gated(config.intermediate_size, activation(config.hidden_activation), bias=config.mlp_bias),
        )
        for layer, (layer_type, window) in enumerate(zip(config.layer_types, layer_windows(config), strict=True))
    )
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size, norm=layer_norm),
        blocks=blocks,
        final_norm=layer_norm,
    )
    layer = HeadLayer(activation(config.classifier_activation), layer_norm, bias=config.classifier_bias)
    with_head = name == "ModernBertDecoderForCausalLM"
    head = Lm(
        # Without the layer, which the headless model does not store, the token table is no head.
        tied=with_head and config.tie_word_embeddings,
        layer=layer if with_head else None,
        bias=with_head and config.decoder_bias,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=head)


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    assert model.decoder.final_norm is not None
    norm_bias = model.decoder.final_norm.bias
    entries = [
        Entry("decoder.embedding.tokens", ("model.embeddings.tok_embeddings.weight",), shard_axis=0),
        *norm("decoder.embedding.norm", "model.embeddings.norm", bias=norm_bias),
        *norm("decoder.final_norm", "model.final_norm", bias=norm_bias),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"model.layers.{i}"
        part = block.attention
        assert isinstance(block.placement, Pre)
        assert isinstance(block.ffn, Gated)
        if block.placement.attention is not None:
            entries += norm(f"{target}.attention.before", f"{source}.attn_norm", bias=norm_bias)
        projections = (f"{source}.attn.q_proj", f"{source}.attn.k_proj", f"{source}.attn.v_proj")
        entries += [
            *qkv(f"{target}.attention.inner.qkv", projections, part),
            *linear(f"{target}.attention.inner.out", f"{source}.attn.Wo", part.out_bias, 1),
            *norm(f"{target}.ffn.before", f"{source}.mlp_norm", bias=norm_bias),
            # What is activated comes first, as in our own matrix.
            *linear(f"{target}.ffn.inner.gate_up", f"{source}.mlp.Wi", block.ffn.bias, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.Wo", block.ffn.bias, 1),
        ]
    ignored = []
    match model.head:
        case Lm(layer=HeadLayer(bias=dense_bias), tied=tied, bias=bias):
            entries += linear("head.dense", "lm_head.dense", dense_bias, 0)
            entries += norm("head.norm", "lm_head.norm", bias=norm_bias)
            output = linear("head.output", "decoder", bias, 0)
            entries += output[1:] if tied else output
        case _:
            ignored = [r"lm_head\..*", r"decoder\.(weight|bias)"]
    return WeightTable(tuple(entries), prefix="model.", ignored=tuple(ignored), head="decoder.weight")


FAMILY = Family(
    name="ModernBERT-decoder",
    architectures=("ModernBertDecoderForCausalLM", "ModernBertDecoderModel"),
    headless=("ModernBertDecoderModel",),
    brings="windows in most layers, a rotary base for each kind, a layer before the output matrix",
    spec=spec,
    weights=weights,
)
