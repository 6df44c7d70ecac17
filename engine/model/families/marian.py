"""Marian: the original Transformer, post-norm with sinusoidal positions (arXiv:1706.03762, arXiv:1804.00344)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import encoder_decoder
from engine.model.positions import Sinusoidal
from engine.model.spec import ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    if config.share_encoder_decoder_embeddings and config.decoder_vocab_size != config.vocab_size:
        raise UnsupportedModelError(
            f"decoder_vocab_size ({config.decoder_vocab_size}) must equal vocab_size ({config.vocab_size}) where "
            "share_encoder_decoder_embeddings is true."
        )
    own = not config.share_encoder_decoder_embeddings
    return encoder_decoder.spec(
        config,
        Sinusoidal(config.max_position_embeddings),
        pre=False,
        embedding_norm=False,
        vocabularies=(config.vocab_size, config.decoder_vocab_size) if own else None,
    )


FAMILY = Family(
    name="Marian",
    architectures=("MarianMTModel", "MarianModel"),
    headless=("MarianModel",),
    brings="the original Transformer: encoder and decoder, norms after the residual, sinusoidal positions",
    spec=spec,
    weights=encoder_decoder.weights,
)
