"""Nemotron: layer norms whose weights are stored as deviations from 1, partial rotary positions, squared ReLU
(arXiv:2402.16819)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families.arcee import up_down_layer
from engine.model.families.common import activation, decoder_table, plain_decoder, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Dense, ModelSpec
from engine.model.table import Affine, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        position=rotary(config, config.head_dim, partial=True),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    return plain_decoder(
        config,
        [attention] * config.num_hidden_layers,
        Dense(config.intermediate_size, activation(config.hidden_act), bias=config.mlp_bias),
        norm=Norm("layer", config.norm_eps, bias=True),
    )


def weights(model: ModelSpec) -> WeightTable:
    table = decoder_table(model, up_down_layer)
    # The reference adds the 1 in the weights' own format as well.
    norms = (".before.weight", "final_norm.weight")
    entries = (
        replace(entry, transform=Affine(offset=1.0)) if entry.target.endswith(norms) else entry
        for entry in table.entries
    )
    return replace(table, entries=tuple(entries))


FAMILY = Family(
    name="Nemotron",
    architectures=("NemotronForCausalLM", "NemotronModel"),
    headless=("NemotronModel",),
    brings="layer norms stored as deviations from 1, squared ReLU, partial rotary positions",
    spec=spec,
    weights=weights,
)
