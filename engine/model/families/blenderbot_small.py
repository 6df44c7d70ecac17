"""Blenderbot Small: norms after the residual; the decoder's tokens are normed before their positions are added
(arXiv:2004.13637)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families import encoder_decoder
from engine.model.positions import Learned
from engine.model.spec import ModelSpec, Tokens
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    positions = Learned(config.max_position_embeddings)
    model = encoder_decoder.spec(config, positions, pre=False, embedding_norm=True)
    assert model.decoder is not None
    tokens = model.decoder.embedding
    assert isinstance(tokens, Tokens)
    tokens = replace(tokens, token_norm=tokens.norm, norm=None)
    return replace(model, decoder=replace(model.decoder, embedding=tokens))


FAMILY = Family(
    name="Blenderbot Small",
    architectures=("BlenderbotSmallForConditionalGeneration", "BlenderbotSmallModel"),
    headless=("BlenderbotSmallModel",),
    brings="encoder and decoder for conversation, normalised embeddings before positions",
    spec=spec,
    weights=encoder_decoder.weights,
)
