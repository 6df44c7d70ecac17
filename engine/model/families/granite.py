"""Granite and GraniteMoE: LLaMA's or Mixtral's blocks with constants that multiply embeddings, scores, logits and what
a layer adds."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import (
    activation,
    decoder_table,
    linear,
    plain_decoder,
    projected_attention,
    projected_layer,
    rotary,
    routed,
)
from engine.model.spec import Attention, Block, Experts, FeedForward, Gated, Lm, ModelSpec, Shared
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=config.attention_multiplier,
        position=rotary(config, head_dim),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    act = activation(config.hidden_act)
    ffn: FeedForward = Gated(config.intermediate_size, act, bias=getattr(config, "mlp_bias", False))
    if config.model_type in ("granitemoe", "granitemoeshared"):
        ffn = routed(
            Gated(config.intermediate_size, act), count=config.num_local_experts, active=config.num_experts_per_tok
        )
    if shared := getattr(config, "shared_intermediate_size", 0):
        assert isinstance(ffn, Experts)
        ffn = Shared(ffn, Gated(shared, act))
    return plain_decoder(
        config,
        [attention] * config.num_hidden_layers,
        ffn,
        scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        head=Lm(tied=config.tie_word_embeddings, logit_scale=1 / config.logits_scaling),
    )


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    if not isinstance(block.ffn, Experts | Shared):
        return projected_layer(target, source, block)
    inner, stored = f"{target}.ffn.inner", f"{source}.block_sparse_moe"
    entries = projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention)
    if isinstance(block.ffn, Shared):
        entries += linear(f"{inner}.always.gate_up", f"{source}.shared_mlp.input_linear", False, 0)
        entries += linear(f"{inner}.always.down", f"{source}.shared_mlp.output_linear", False, 1)
        inner = f"{inner}.routed"
    return [
        *entries,
        Entry(f"{inner}.router.weight", (f"{stored}.router.layer.weight",)),
        Entry(f"{inner}.up.weight", (f"{stored}.input_linear.weight",), shard_axis=1),
        Entry(f"{inner}.down.weight", (f"{stored}.output_linear.weight",), shard_axis=2),
    ]


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="Granite and GraniteMoE",
    architectures=(
        "GraniteForCausalLM",
        "GraniteModel",
        "GraniteMoeForCausalLM",
        "GraniteMoeModel",
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedModel",
    ),
    headless=("GraniteModel", "GraniteMoeModel", "GraniteMoeSharedModel"),
    brings="scaled embeddings, scores, residuals and logits; MoE with optional shared experts",
    spec=spec,
    weights=weights,
)
