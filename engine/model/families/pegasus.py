"""PEGASUS: pre-norm encoder and decoder, sinusoidal positions (arXiv:1912.08777)."""

from __future__ import annotations

from typing import Any

from engine.model.families import encoder_decoder
from engine.model.positions import Sinusoidal
from engine.model.spec import ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    return encoder_decoder.spec(config, Sinusoidal(config.max_position_embeddings), pre=True, embedding_norm=False)


FAMILY = Family(
    name="PEGASUS",
    architectures=("PegasusForConditionalGeneration", "PegasusModel"),
    headless=("PegasusModel",),
    brings="encoder and decoder, norms before sublayers, sinusoidal positions",
    spec=spec,
    weights=encoder_decoder.weights,
)
