"""ERNIE 4.5 with experts: rotary positions of neighbouring features, experts chosen by corrected probabilities in some
layers, and beside them one for every token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    decoder_table,
    gated,
    projected_attention,
    projected_experts,
    rotary,
    routed,
)
from engine.model.normalisation import Norm
from engine.model.spec import (
    Attention,
    Block,
    Corrected,
    Experts,
    FeedForward,
    Gated,
    Lm,
    ModelSpec,
    Pre,
    Shared,
    Stack,
    Tokens,
)
from engine.model.table import Entry, Family, Row, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norm = Norm("rms", config.rms_norm_eps)
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim, interleaved=True, in_float32=True),
        qkv_bias=config.use_bias,
        out_bias=config.use_bias,
    )
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size),
        blocks=tuple(
            Block(placement=Pre(norm, norm), attention=attention, ffn=_feed_forward(config, layer))
            for layer in range(config.num_hidden_layers)
        ),
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings, bias=config.use_bias))


def _feed_forward(config: Any, layer: int) -> FeedForward:
    """Experts in every moe_layer_interval-th layer from moe_layer_start_index to moe_layer_end_index."""
    every = config.moe_layer_interval
    if not every or every < 1:
        raise UnsupportedModelError(f"moe_layer_interval of the config must be at least 1, got {every}.")
    act = activation(config.hidden_act)
    first, last = config.moe_layer_start_index, config.moe_layer_end_index
    if not first <= layer <= last or (layer + 1) % every:
        return Gated(config.intermediate_size, act, bias=config.use_bias)
    width, shared = config.moe_intermediate_size, config.moe_num_shared_experts
    experts = routed(
        Gated(width, act),
        count=config.moe_num_experts,
        active=config.moe_k,
        routing=Corrected("softmax", least=config.moe_norm_min),
    )
    return Shared(experts, Gated(width * shared, act, bias=config.use_bias)) if shared else experts


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    inner, stored = f"{target}.ffn.inner", f"{source}.mlp"
    entries = projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention)
    match block.ffn:
        case Shared(part, Gated() as always):
            entries += _experts(f"{inner}.routed", stored, part)
            entries += gated(f"{inner}.always", f"{stored}.shared_experts", always)
        case Experts():
            entries += _experts(inner, stored, block.ffn)
        case Gated():
            entries += gated(inner, stored, block.ffn)
    return entries


def _experts(target: str, source: str, part: Experts) -> list[Entry]:
    names = ("moe_statics", "gate.moe_statics")
    corrections = (f"{source}.{name}.e_score_correction_bias" for name in names)
    return [
        *projected_experts(target, source, part),
        *(Entry(f"{target}.correction", (name,), Row()) for name in corrections),
    ]


def weights(model: ModelSpec) -> WeightTable:
    table = decoder_table(model, _layer)
    # What guesses later tokens is unread in transformers, too.
    return replace(table, ignored=(*table.ignored, r"model\.mtp_.*"))


FAMILY = Family(
    name="ERNIE 4.5 with experts",
    architectures=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel"),
    headless=("Ernie4_5_MoeModel",),
    brings="MoE in some layers, routed by corrected probabilities, with a shared expert",
    spec=spec,
    weights=weights,
)
