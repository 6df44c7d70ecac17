"""mBART: pre-norm encoder and decoder for many languages (arXiv:2001.08210)."""

from __future__ import annotations

from typing import Any

from engine.model.families import encoder_decoder
from engine.model.families.classification import repeats_after_last
from engine.model.spec import ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    return encoder_decoder.spec(config, encoder_decoder.learned(config), pre=True, embedding_norm=True)


FAMILY = Family(
    name="mBART",
    architectures=("MBartForConditionalGeneration", "MBartModel"),
    headless=("MBartModel",),
    brings="encoder and decoder, norms before sublayers, language codes",
    spec=spec,
    weights=encoder_decoder.weights,
    repeats=repeats_after_last,
)
