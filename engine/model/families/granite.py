"""Granite: LLaMA's blocks with constants that multiply embeddings, scores, logits and what a layer adds."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, plain_decoder, rotary
from engine.model.spec import Attention, Gated, Lm, ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=config.attention_multiplier,
        position=rotary(config, head_dim),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    return plain_decoder(
        config,
        [attention] * config.num_hidden_layers,
        Gated(config.intermediate_size, activation(config.hidden_act), bias=config.mlp_bias),
        scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        head=Lm(tied=config.tie_word_embeddings, logit_scale=1 / config.logits_scaling),
    )


FAMILY = Family(
    name="Granite",
    architectures=("GraniteForCausalLM", "GraniteModel"),
    headless=("GraniteModel",),
    brings="scaled embeddings, scores, residuals and logits",
    spec=spec,
    weights=decoder_table,
)
