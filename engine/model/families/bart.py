"""BART: post-norm encoder and decoder, learned positions (arXiv:1910.13461); PLBART for code (arXiv:2103.06333) and
MVP for many tasks (arXiv:2206.12131) are the same model."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.interface.outputs import RepeatedInput
from engine.model.families import encoder_decoder
from engine.model.families.classification import repeats_after_last, repeats_after_start
from engine.model.spec import ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    if getattr(config, "use_prompt", False):
        raise UnsupportedModelError(
            "use_prompt must be false: no part puts learned keys and values before those of each layer."
        )
    return encoder_decoder.spec(config, encoder_decoder.learned(config), pre=False, embedding_norm=True)


def _repeats(config: Any) -> RepeatedInput:
    # Texts of PLBART end with their language, with which its decoder begins, as that of mBART does.
    return (repeats_after_last if config.model_type == "plbart" else repeats_after_start)(config)


FAMILY = Family(
    name="BART, PLBART, MVP",
    architectures=(
        "BartForConditionalGeneration",
        "BartModel",
        "PLBartForConditionalGeneration",
        "PLBartModel",
        "MvpForConditionalGeneration",
        "MvpModel",
    ),
    headless=("BartModel", "PLBartModel", "MvpModel"),
    brings="encoder and decoder, norms after the residual, learned positions",
    spec=spec,
    weights=encoder_decoder.weights,
    repeats=_repeats,
)
