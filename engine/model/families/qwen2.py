"""Qwen2 and Qwen2.5: LLaMA's blocks with biases of queries, keys and values, and windows in the upper layers if
asked for (arXiv:2407.10671)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, layer_windows, plain_decoder, rotary
from engine.model.spec import Attention, Gated, ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attentions = [
        Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim),
            window=window,
            qkv_bias=True,
        )
        for window in layer_windows(config)
    ]
    return plain_decoder(config, attentions, Gated(config.intermediate_size, activation(config.hidden_act)))


FAMILY = Family(
    name="Qwen2",
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    headless=("Qwen2Model",),
    brings="biases only for queries, keys and values; optional sliding windows in the upper layers",
    spec=spec,
    weights=decoder_table,
)
