"""StarCoder2: layer norms, rotary positions, a plain feed-forward network, a window in all layers if asked for
(arXiv:2402.19173)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import (
    activation,
    decoder_table,
    dense,
    plain_decoder,
    projected_attention,
    rotary,
    sliding_window,
)
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Dense, ModelSpec
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim),
        window=sliding_window(config.sliding_window),
        qkv_bias=config.use_bias,
        out_bias=config.use_bias,
    )
    return plain_decoder(
        config,
        [attention] * config.num_hidden_layers,
        Dense(config.intermediate_size, activation(config.hidden_act), bias=config.use_bias),
        norm=Norm("layer", config.norm_epsilon, bias=True),
    )


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    assert isinstance(block.ffn, Dense)
    return [
        *projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention),
        *dense(f"{target}.ffn.inner", f"{source}.mlp", block.ffn, ("c_fc", "c_proj")),
    ]


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="StarCoder2",
    architectures=("Starcoder2ForCausalLM", "Starcoder2Model"),
    headless=("Starcoder2Model",),
    brings="rotary positions with layer norms and a plain feed-forward network",
    spec=spec,
    weights=weights,
)
