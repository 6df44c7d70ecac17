"""ConvBERT: BERT's encoder in which half of the heads are convolutions (arXiv:2008.02496)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, attention, dense_network, linear, qkv
from engine.model.families.encoder import BERT_LAYER, GENERATOR_HEADS, KINDS, EncoderNames, encoder, of
from engine.model.families.encoder_only import bert_stack, masked_lm, named_head
from engine.model.positions import Learned
from engine.model.spec import Attention, Dense, FeedForward, Head, Spans, Stack
from engine.model.table import Entry, Groups, Reshaped, Same, Taps


def _stack(config: Any) -> Stack:
    encoder = bert_stack(config, Learned(config.max_position_embeddings), config.embedding_size)
    ratio = config.head_ratio
    heads = max(config.num_attention_heads // ratio, 1)
    if config.hidden_size % (2 * heads):
        raise UnsupportedModelError(
            f"The config has {config.hidden_size} hidden features, but {heads} attention heads and as "
            "many convolution heads must share them evenly."
        )
    if config.conv_kernel_size % 2 == 0:
        raise UnsupportedModelError(
            "conv_kernel_size of the config must be odd, so that a token is in the middle; got "
            f"{config.conv_kernel_size}."
        )
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % config.num_groups:
            raise UnsupportedModelError(
                f"{name} of the config must be a multiple of its num_groups {config.num_groups}, got "
                f"{getattr(config, name)}."
            )
    head_dim = config.hidden_size // heads // 2
    spans = Spans(config.conv_kernel_size)
    own = attention(config, heads=heads, kv_heads=heads, head_dim=head_dim, causal=False, bias=True, spans=spans)
    ffn = replace(dense_network(config), groups=config.num_groups)
    blocks = tuple(replace(block, attention=own, ffn=ffn) for block in encoder.blocks)
    return replace(encoder, blocks=blocks)


def _head(config: Any) -> Head:
    return named_head(config, masked_lm(config, "gelu", config.layer_norm_eps), activation(config.hidden_act))


def _attention_weights(target: str, source: str, part: Attention) -> list[Entry]:
    stored, width = f"{source}.attention.self", part.heads * part.head_dim
    separable = f"{stored}.key_conv_attn_layer"
    assert part.spans is not None
    return [
        *qkv(f"{target}.qkv", (f"{stored}.query", f"{stored}.key", f"{stored}.value"), part),
        Entry(
            f"{target}.spans.neighbours",
            (f"{separable}.depthwise.weight",),
            # There are as many convolution heads as attention heads.
            Reshaped(((2 * width, 1, part.spans.kernel),)),
        ),
        Entry(f"{target}.spans.mix.weight", (f"{separable}.pointwise.weight",), Taps(1)),
        Entry(f"{target}.spans.mix.bias", (f"{separable}.bias",), Reshaped(((width, 1),))),
        *linear(f"{target}.spans.scores", f"{stored}.conv_kernel_layer", True),
        *linear(f"{target}.spans.values", f"{stored}.conv_out_layer", True),
        *linear(f"{target}.out", f"{source}.attention.output.dense", True),
    ]


def _network_weights(target: str, source: str, part: FeedForward) -> list[Entry]:
    assert isinstance(part, Dense)
    grouped = Groups(part.groups) if part.groups > 1 else Same()
    return [
        Entry(f"{target}.up.weight", (f"{source}.intermediate.dense.weight",), grouped),
        Entry(f"{target}.up.bias", (f"{source}.intermediate.dense.bias",)),
        Entry(f"{target}.down.weight", (f"{source}.output.dense.weight",), grouped),
        Entry(f"{target}.down.bias", (f"{source}.output.dense.bias",)),
    ]


FAMILY = encoder(
    "ConvBERT",
    of(KINDS, "ConvBert"),
    "BERT's encoder; half of the heads are convolutions",
    stack=_stack,
    head=_head,
    names=EncoderNames(
        stem="convbert",
        expansion="embeddings_project",
        layer=replace(BERT_LAYER, attention=_attention_weights, ffn=_network_weights),
        heads=GENERATOR_HEADS,
    ),
)
