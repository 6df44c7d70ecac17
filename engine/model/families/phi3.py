"""Phi-3 and Phi-4: LLaMA's blocks with fused projections, partial rotation and longrope (arXiv:2404.14219)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, linear, plain_decoder, rotary, sliding_window
from engine.model.spec import Attention, Block, Gated, ModelSpec
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim, partial=True),
        window=sliding_window(config.sliding_window),
    )
    ffn = Gated(config.intermediate_size, activation(config.hidden_act))
    return plain_decoder(config, [attention] * config.num_hidden_layers, ffn)


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    # Both fused matrices are stored in our order of rows.
    return [
        *linear(f"{target}.attention.inner.qkv", f"{source}.self_attn.qkv_proj", False, shard_axis=0),
        *linear(f"{target}.attention.inner.out", f"{source}.self_attn.o_proj", False, shard_axis=1),
        *linear(f"{target}.ffn.inner.gate_up", f"{source}.mlp.gate_up_proj", False, shard_axis=0),
        *linear(f"{target}.ffn.inner.down", f"{source}.mlp.down_proj", False, shard_axis=1),
    ]


FAMILY = Family(
    name="Phi-3",
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    headless=("Phi3Model",),
    brings="fused projections, partial rotary positions, longrope",
    spec=spec,
    weights=weights,
)
