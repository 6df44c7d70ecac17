"""MiniMax-M2: partly rotary heads, norms of whole projections, experts chosen by corrected scores."""

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
)
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Corrected, Experts, Gated, ModelSpec, WholeProjection
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim, partial=True),
        qk_norm=WholeProjection(Norm("rms", config.rms_norm_eps)),
    )
    ffn = routed(
        Gated(config.intermediate_size, activation(config.hidden_act)),
        count=config.num_local_experts,
        active=config.num_experts_per_tok,
        routing=Corrected(),
    )
    return plain_decoder(config, [attention] * config.num_hidden_layers, ffn)


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    assert isinstance(block.ffn, Experts)
    inner, stored, fused = f"{target}.ffn.inner", f"{source}.block_sparse_moe", f"{source}.mlp"
    return [
        *projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention),
        *experts(inner, f"{stored}.experts", block.ffn, ("w1", "w3", "w2"), f"{stored}.gate"),
        *fused_experts(inner, f"{fused}.experts", f"{fused}.gate"),
        *(Entry(f"{inner}.correction", (f"{name}.e_score_correction_bias",)) for name in (stored, fused)),
    ]


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="MiniMax-M2",
    architectures=("MiniMaxM2ForCausalLM", "MiniMaxM2Model"),
    headless=("MiniMaxM2Model",),
    brings="QK norms over the whole projection, partial rotary positions, MoE with corrected scores",
    spec=spec,
    weights=weights,
)
