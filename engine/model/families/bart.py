"""BART: post-norm encoder and decoder, learned positions (arXiv:1910.13461)."""

from __future__ import annotations

from typing import Any

from engine.model.families import encoder_decoder
from engine.model.families.classification import repeats_after_start
from engine.model.spec import ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    return encoder_decoder.spec(config, encoder_decoder.learned(config), pre=False, embedding_norm=True)


FAMILY = Family(
    name="BART",
    architectures=("BartForConditionalGeneration", "BartModel"),
    headless=("BartModel",),
    brings="encoder and decoder, norms after the residual, learned positions",
    spec=spec,
    weights=encoder_decoder.weights,
    repeats=repeats_after_start,
)
