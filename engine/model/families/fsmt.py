"""FSMT: fairseq's Transformer, a vocabulary for each language of a pair (WMT19, arXiv:1907.06616)."""

from __future__ import annotations

from functools import partial
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import encoder_decoder
from engine.model.spec import ModelSpec
from engine.model.table import Family


def spec(config: Any) -> ModelSpec:
    read, written = config.src_vocab_size, config.tgt_vocab_size
    if config.tie_word_embeddings and read != written:
        raise UnsupportedModelError(
            f"src_vocab_size ({read}) must equal tgt_vocab_size ({written}) where tie_word_embeddings is true."
        )
    return encoder_decoder.spec(
        config,
        encoder_decoder.fixed_after_padding(config),
        pre=False,
        embedding_norm=False,
        head_bias=False,
        vocabularies=None if config.tie_word_embeddings else (read, written),
    )


FAMILY = Family(
    name="FSMT",
    architectures=("FSMTForConditionalGeneration",),
    brings="Marian's blocks with M2M-100's positions, a vocabulary per language",
    spec=spec,
    weights=partial(encoder_decoder.weights, output="model.decoder.output_projection"),
)
