"""M2M-100, NLLB-200 and SMaLL-100: mBART's blocks with fixed positions (arXiv:2010.11125, 2207.04672, 2210.11621)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import encoder_decoder
from engine.model.positions import SpannedSinusoidal
from engine.model.spec import ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    padding = config.pad_token_id
    if not isinstance(padding, int) or not 0 <= padding < config.vocab_size:
        raise UnsupportedModelError(
            f"pad_token_id of the config must be an id below its vocab_size {config.vocab_size}, since positions are "
            f"counted from the row after it; got {padding!r}."
        )
    first = padding + 1  # the rows before it belong to no position
    positions = SpannedSinusoidal(config.max_position_embeddings + first, offset=first, unplaced=padding)
    return encoder_decoder.spec(config, positions, pre=True, embedding_norm=False, head_bias=False)


FAMILY = Family(
    name="M2M-100, NLLB",
    architectures=("M2M100ForConditionalGeneration", "M2M100Model"),
    headless=("M2M100Model",),
    brings="encoder and decoder for 100 and 200 languages, norms before sublayers, sinusoidal positions",
    spec=spec,
    weights=encoder_decoder.weights,
)
