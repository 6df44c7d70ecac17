"""Seed-OSS: LLaMA's blocks with a setting of its own for the bias of attention's output."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, plain_decoder, rotary
from engine.model.spec import Attention, Gated, ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        position=rotary(config, config.head_dim),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_out_bias,
    )
    ffn = Gated(config.intermediate_size, activation(config.hidden_act), bias=config.mlp_bias)
    return plain_decoder(config, [attention] * config.num_hidden_layers, ffn)


FAMILY = Family(
    name="Seed-OSS",
    architectures=("SeedOssForCausalLM", "SeedOssModel"),
    headless=("SeedOssModel",),
    brings="optional biases for queries, keys and values, and for the attention output",
    spec=spec,
    weights=decoder_table,
)
