"""LongT5: T5 for long texts, with a window in each encoder layer and optional sums of blocks (arXiv:2112.07916)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families import t5
from engine.model.normalisation import Norm
from engine.model.spec import BlockSums, ModelSpec, Stack
from engine.model.table import Entry, Family, WeightTable

_LOCAL, _GLOBAL = "local", "transient-global"


def spec(config: Any) -> ModelSpec:
    model = t5.spec(config)
    assert model.encoder is not None
    return replace(model, encoder=_windowed(config, model.encoder))


def _windowed(config: Any, encoder: Stack) -> Stack:
    kind = config.encoder_attention_type
    if kind not in (_LOCAL, _GLOBAL):
        raise UnsupportedModelError(
            f"encoder_attention_type of the config must be {_LOCAL} or {_GLOBAL}, got {kind!r}."
        )
    reach = config.local_radius
    sees: Window | BlockSums = Window(reach, reach)
    if kind == _GLOBAL:
        sees = BlockSums(config.global_block_size, Norm("rms", config.layer_norm_epsilon), reach)
    blocks = tuple(replace(block, attention=replace(block.attention, sees=sees)) for block in encoder.blocks)
    return replace(encoder, blocks=blocks, block_bias=encoder.shared_bias if kind == _GLOBAL else None)


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    table = t5.weights(model)
    entries = list(table.entries)
    if model.encoder.block_bias is not None:
        first = "encoder.block.0.layer.0.SelfAttention.global_relative_attention_bias.weight"
        entries.append(Entry("encoder.block_bias.weight", (first,)))
        for i in range(len(model.encoder.blocks)):
            source = f"encoder.block.{i}.layer.0.SelfAttention.global_input_layer_norm.weight"
            entries.append(Entry(f"encoder.blocks.{i}.attention.inner.block_norm.weight", (source,)))
    # The encoder's attention has another name for each kind.
    renamed = ((r"\.(Local|TransientGlobal)SelfAttention\.", ".SelfAttention."),)
    return replace(table, entries=tuple(entries), renamed=renamed)


FAMILY = Family(
    name="LongT5",
    architectures=("LongT5ForConditionalGeneration", "LongT5Model"),
    headless=("LongT5Model",),
    brings="T5 for long texts: windows in the encoder, and sums of blocks that all tokens see",
    spec=spec,
    weights=weights,
)
