"""Mistral and Ministral: LLaMA's blocks with a sliding window in every layer (arXiv:2310.06825), in some layers
(Ministral), or in none."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, layer_windows, plain_decoder, rotary, sliding_window
from engine.model.spec import Attention, Gated, ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    # transformers reads a Mistral config with layer_types as a Ministral's.
    windows = [sliding_window(config.sliding_window)] * config.num_hidden_layers
    if config.model_type == "ministral":
        windows = layer_windows(config)
    attentions = [
        Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim),
            window=window,
        )
        for window in windows
    ]
    ffn = Gated(config.intermediate_size, activation(config.hidden_act))
    return plain_decoder(config, attentions, ffn)


FAMILY = Family(
    name="Mistral and Ministral",
    architectures=("MistralForCausalLM", "MistralModel", "MinistralForCausalLM", "MinistralModel"),
    headless=("MistralModel", "MinistralModel"),
    brings="sliding windows in all layers or in some",
    spec=spec,
    weights=decoder_table,
)
