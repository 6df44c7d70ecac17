"""Mixtral: LLaMA's blocks with experts as feed-forward networks, and perhaps a window (arXiv:2401.04088)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import (
    activation,
    decoder_table,
    experts,
    fused_experts,
    plain_decoder,
    projected_attention,
    rotary,
    routed,
    sliding_window,
)
from engine.model.spec import Attention, Block, Experts, Gated, ModelSpec
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim),
        window=sliding_window(config.sliding_window),
    )
    ffn = routed(
        Gated(config.intermediate_size, activation(config.hidden_act)),
        count=config.num_local_experts,
        active=config.num_experts_per_tok,
    )
    return plain_decoder(config, [attention] * config.num_hidden_layers, ffn)


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    assert isinstance(block.ffn, Experts)
    inner, stored = f"{target}.ffn.inner", f"{source}.block_sparse_moe"
    return [
        *projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention),
        *experts(inner, f"{stored}.experts", block.ffn, ("w1", "w3", "w2"), f"{stored}.gate"),
        *fused_experts(inner, f"{source}.mlp.experts", f"{source}.mlp.gate"),
    ]


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="Mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    headless=("MixtralModel",),
    brings="MoE with top-k routing",
    spec=spec,
    weights=weights,
)
