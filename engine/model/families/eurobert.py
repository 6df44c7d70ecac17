"""EuroBERT: LLaMA's blocks, in which tokens see later ones (arXiv:2503.05500)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, decoder_table, plain_decoder, rotary
from engine.model.spec import Attention, Gated, ModelSpec, Pool
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    if config.architectures[0] != "EuroBertModel":
        raise UnsupportedModelError(
            f"{config.architectures[0]} has a head that is not implemented; EuroBertModel is served, for embeddings."
        )
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        position=rotary(config, config.head_dim),
        causal=False,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    ffn = Gated(config.intermediate_size, activation(config.hidden_act), bias=config.mlp_bias)
    model = plain_decoder(config, [attention] * config.num_hidden_layers, ffn)
    return ModelSpec(encoder=model.decoder, decoder=None, head=Pool())


def weights(model: ModelSpec) -> WeightTable:
    table = decoder_table(replace(model, encoder=None, decoder=model.encoder))
    entries = (replace(entry, target=re.sub(r"^decoder\.", "encoder.", entry.target)) for entry in table.entries)
    return replace(table, entries=tuple(entries), head=None)


FAMILY = Family(
    name="EuroBERT",
    architectures=("EuroBertModel",),
    brings="LLaMA's blocks as an encoder",
    spec=spec,
    weights=weights,
)
