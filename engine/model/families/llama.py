"""LLaMA: pre-norm RMS blocks, rotary positions, grouped-query attention, gated SiLU (arXiv:2302.13971)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, plain_decoder, rotary
from engine.model.spec import Attention, Gated, ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    ffn = Gated(config.intermediate_size, activation(config.hidden_act), bias=config.mlp_bias)
    return plain_decoder(config, [attention] * config.num_hidden_layers, ffn)


FAMILY = Family(
    name="LLaMA",
    architectures=("LlamaForCausalLM", "LlamaModel"),
    headless=("LlamaModel",),
    brings="rotary positions with every RoPE scaling, grouped-query attention, gated SiLU, RMS norms",
    spec=spec,
    weights=decoder_table,
)
