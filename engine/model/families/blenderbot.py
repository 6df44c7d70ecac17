"""Blenderbot: norms before sublayers, and learned positions from the first row of their table on (arXiv:2004.13637)."""

from __future__ import annotations

from typing import Any

from engine.model.families import encoder_decoder
from engine.model.positions import Learned
from engine.model.spec import ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    positions = Learned(config.max_position_embeddings)
    return encoder_decoder.spec(config, positions, pre=True, embedding_norm=False)


FAMILY = Family(
    name="Blenderbot",
    architectures=("BlenderbotForConditionalGeneration", "BlenderbotModel"),
    headless=("BlenderbotModel",),
    brings="encoder and decoder for conversation, norms before sublayers, learned positions",
    spec=spec,
    weights=encoder_decoder.weights,
)
