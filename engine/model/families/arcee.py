"""Arcee (AFM): LLaMA's attention with a plain feed-forward network of squared ReLU (arXiv:2109.08668)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, dense, plain_decoder, projected_attention, rotary
from engine.model.spec import Attention, Block, Dense, ModelSpec
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        position=rotary(config, config.head_dim),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    ffn = Dense(config.intermediate_size, activation(config.hidden_act), bias=config.mlp_bias)
    return plain_decoder(config, [attention] * config.num_hidden_layers, ffn)


def up_down_layer(target: str, source: str, block: Block) -> list[Entry]:
    """A layer with LLaMA's attention, and `up_proj` and `down_proj` alone."""
    assert isinstance(block.ffn, Dense)
    return [
        *projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention),
        *dense(f"{target}.ffn.inner", f"{source}.mlp", block.ffn, ("up_proj", "down_proj")),
    ]


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, up_down_layer)


FAMILY = Family(
    name="Arcee",
    architectures=("ArceeForCausalLM", "ArceeModel"),
    headless=("ArceeModel",),
    brings="plain feed-forward network with squared ReLU",
    spec=spec,
    weights=weights,
)
