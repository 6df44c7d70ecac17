"""OLMo: LLaMA's blocks with layer norms that have no weights, projections clipped if asked for (arXiv:2402.00838)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation, decoder_table, plain_decoder, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Gated, ModelSpec
from engine.model.table import Family, WeightTable

_EPS = 1e-5  # no setting of the config


def spec(config: Any) -> ModelSpec:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim, in_float32=True),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        clip=config.clip_qkv,
    )
    return plain_decoder(
        config,
        [attention] * config.num_hidden_layers,
        Gated(config.intermediate_size, activation(config.hidden_act)),
        norm=Norm("layer", _EPS, weight=False),
    )


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, norms={})


FAMILY = Family(
    name="OLMo",
    architectures=("OlmoForCausalLM", "OlmoModel"),
    headless=("OlmoModel",),
    brings="norms without weights, clipped projections",
    spec=spec,
    weights=weights,
)
