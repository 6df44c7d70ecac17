"""ERNIE 4.5 and Helium: LLaMA's blocks with rotary positions of neighbouring features."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, decoder_table, plain_decoder, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Gated, ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    helium = config.model_type == "helium"
    features = config.num_attention_heads * config.head_dim
    if helium and features != config.hidden_size:
        raise UnsupportedModelError(
            f"num_attention_heads times head_dim must be hidden_size {config.hidden_size} for Helium, got {features}."
        )
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        position=rotary(config, config.head_dim, interleaved=True, in_float32=not helium),
        qkv_bias=config.attention_bias if helium else config.use_bias,
        out_bias=False if helium else config.use_bias,
    )
    bias = config.mlp_bias if helium else config.use_bias
    return plain_decoder(
        config,
        [attention] * config.num_hidden_layers,
        Gated(config.intermediate_size, activation(config.hidden_act), bias=bias),
        norm=Norm("rms", config.rms_norm_eps, in_float32=helium),
    )


FAMILY = Family(
    name="ERNIE 4.5 and Helium",
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5Model", "HeliumForCausalLM", "HeliumModel"),
    headless=("Ernie4_5Model", "HeliumModel"),
    brings="LLaMA's blocks with interleaved rotary positions",
    spec=spec,
    weights=decoder_table,
)
