"""M2M-100, NLLB-200 and SMaLL-100: mBART's blocks with fixed positions (arXiv:2010.11125, 2207.04672, 2210.11621)."""

from __future__ import annotations

from typing import Any

from engine.model.families import encoder_decoder
from engine.model.spec import ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    positions = encoder_decoder.fixed_after_padding(config)
    return encoder_decoder.spec(config, positions, pre=True, embedding_norm=False, head_bias=False)


FAMILY = Family(
    name="M2M-100, NLLB, SMaLL-100",
    architectures=("M2M100ForConditionalGeneration", "M2M100Model"),
    headless=("M2M100Model",),
    brings="encoder and decoder for 100 to 200 languages, norms before sublayers, sinusoidal positions",
    spec=spec,
    weights=encoder_decoder.weights,
)
