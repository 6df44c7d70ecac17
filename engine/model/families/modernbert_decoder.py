"""ModernBERT as a decoder (Ettin): ModernBERT's blocks over earlier tokens only, a layer before the output matrix
(arXiv:2507.11412)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, layer_windows, linear
from engine.model.families.modernbert import NAMES, block_norm, stack
from engine.model.families.names import norm_weights, stack_weights
from engine.model.spec import HeadLayer, Lm, ModelSpec
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    name = config.architectures[0]
    if name.endswith("ForSequenceClassification"):
        raise UnsupportedModelError(f"{name} is not supported: its layer before the class scores is not implemented.")
    layer_norm = block_norm(config)
    decoder = stack(config, layer_norm, layer_windows(config), causal=True)
    layer = HeadLayer(activation(config.classifier_activation), layer_norm, bias=config.classifier_bias)
    with_head = name == "ModernBertDecoderForCausalLM"
    head = Lm(
        # Without the layer, which the headless model does not store, the token table is not a head.
        tied=with_head and config.tie_word_embeddings,
        layer=layer if with_head else None,
        bias=with_head and config.decoder_bias,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=head)


def weights(model: ModelSpec) -> WeightTable:
    apart = replace(NAMES, qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"))
    entries = stack_weights("decoder", model.trunk, apart)
    ignored = []
    match model.head:
        case Lm(layer=HeadLayer(bias=dense_bias), tied=tied, bias=bias):
            entries += linear("head.dense", "lm_head.dense", dense_bias)
            entries += norm_weights("head.norm", "lm_head.norm", model.trunk.final_norm)
            output = linear("head.output", "decoder", bias)
            entries += output[1:] if tied else output
        case _:
            ignored = [r"lm_head\..*", r"decoder\.(weight|bias)"]
    return WeightTable(tuple(entries), prefix="model.", ignored=tuple(ignored), head="decoder.weight")


FAMILY = Family(
    name="ModernBERT-decoder",
    architectures=("ModernBertDecoderForCausalLM", "ModernBertDecoderModel"),
    headless=("ModernBertDecoderModel",),
    brings="sliding windows in most layers, separate rotary bases, a dense layer before the output matrix",
    spec=spec,
    weights=weights,
)
