"""Apertus: LLaMA's blocks with norms of queries and keys, and a plain feed-forward network of xIELU
(arXiv:2509.14233)."""

from __future__ import annotations

from typing import Any

from engine.model.families.arcee import up_down_layer
from engine.model.families.common import (
    activation,
    decoder_table,
    linear,
    plain_decoder,
    projected_attention,
    rotary,
)
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Dense, ModelSpec, PerHead, Xielu
from engine.model.table import Entry, Family, WeightTable

NORMS = {"attention.before": "attention_layernorm", "ffn.before": "feedforward_layernorm"}
# Xielu's numbers by the names that they are stored under; the last two are no more than constants.
NUMBERS = {"positive": "alpha_p", "negative": "alpha_n", "linear": "beta", "least": "eps"}
CONSTANTS = {"linear": 0.5, "least": -1e-6}


def spec(config: Any) -> ModelSpec:
    # Not an attribute of the config unless the checkpoint sets it.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim),
        qk_norm=PerHead(Norm("rms", config.rms_norm_eps)),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    width = config.intermediate_size
    ffn = Xielu(width) if config.hidden_act == "xielu" else Dense(width, activation(config.hidden_act))
    return plain_decoder(config, [attention] * config.num_hidden_layers, ffn)


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    if not isinstance(block.ffn, Xielu):
        return up_down_layer(target, source, block)
    inner, mlp = f"{target}.ffn.inner", f"{source}.mlp"
    return [
        *projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention),
        *linear(f"{inner}.up", f"{mlp}.up_proj", block.ffn.bias, 0),
        *linear(f"{inner}.down", f"{mlp}.down_proj", block.ffn.bias, 1),
        *(
            Entry(f"{inner}.{ours}", (f"{mlp}.act_fn.{theirs}",), default=CONSTANTS.get(ours))
            for ours, theirs in NUMBERS.items()
        ),
    ]


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer, NORMS)


FAMILY = Family(
    name="Apertus",
    architectures=("ApertusForCausalLM", "ApertusModel"),
    headless=("ApertusModel",),
    brings="plain feed-forward network with xIELU (learned slopes), QK norms",
    spec=spec,
    weights=weights,
)
