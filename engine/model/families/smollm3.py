"""SmolLM3: LLaMA's blocks, every few layers one without positions."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, decoder_table, layer_windows, plain_decoder, rotary
from engine.model.spec import Attention, Gated, ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if len(config.no_rope_layers) < config.num_hidden_layers:
        raise UnsupportedModelError(
            "no_rope_layers of the config must have one entry for each of num_hidden_layers "
            f"{config.num_hidden_layers}, but has {len(config.no_rope_layers)}."
        )
    windows = layer_windows(config) if config.use_sliding_window else [None] * config.num_hidden_layers
    attentions = [
        Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim) if rotates else None,
            window=window,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
        )
        for rotates, window in zip(config.no_rope_layers, windows, strict=False)
    ]
    ffn = Gated(config.intermediate_size, activation(config.hidden_act), bias=config.mlp_bias)
    return plain_decoder(config, attentions, ffn)


FAMILY = Family(
    name="SmolLM3",
    architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
    headless=("SmolLM3Model",),
    brings="layers without positions between the others",
    spec=spec,
    weights=decoder_table,
)
