"""Qwen3: LLaMA's blocks with queries and keys normalised per head (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, layer_windows, plain_decoder, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Gated, ModelSpec, PerHead
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    attentions = [
        Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim),
            window=window,
            qk_norm=PerHead(Norm("rms", config.rms_norm_eps)),
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
        )
        for window in layer_windows(config)
    ]
    return plain_decoder(config, attentions, Gated(config.intermediate_size, activation(config.hidden_act)))


FAMILY = Family(
    name="Qwen3",
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    headless=("Qwen3Model",),
    brings="QK norms per head",
    spec=spec,
    weights=decoder_table,
)
