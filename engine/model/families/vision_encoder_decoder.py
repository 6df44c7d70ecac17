"""Encoder-decoders that read an image and write its text: TrOCR (arXiv:2109.10282), an encoder of patches and a decoder
like BART's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import output_table
from engine.model.families.encoder_decoder import FAIRSEQ, fixed_after_padding, learned, stack_of
from engine.model.families.names import stack_weights
from engine.model.families.vit import tower, tower_weights, unread
from engine.model.spec import Lm, ModelSpec, Pre, Stack
from engine.model.table import Entry, Family, WeightTable

_FIRST = {"vit": 1, "deit": 2}  # learned vectors before those of an image's patches, by the encoder's type


def spec(config: Any) -> ModelSpec:
    seen, written = config.encoder, config.decoder
    if seen.model_type not in _FIRST:
        raise UnsupportedModelError(
            f"encoder of the config is of the type {seen.model_type!r}; supported are {', '.join(_FIRST)}."
        )
    encoder, decoder = tower(seen, _FIRST[seen.model_type]), _decoder(written)
    given = getattr(written, "cross_attention_hidden_size", None)
    if (given or decoder.hidden_size) != encoder.hidden_size:
        raise UnsupportedModelError(
            "cross_attention_hidden_size of the decoder's config must be the number of the encoder's features, "
            f"{encoder.hidden_size}, got {given!r}: a matrix between encoder and decoder is not implemented."
        )
    return ModelSpec(
        encoder=encoder,
        decoder=decoder,
        head=Lm(tied=written.tie_word_embeddings),
        context_length=written.max_position_embeddings,
        shared_tokens=False,
    )


def _decoder(config: Any) -> Stack:
    kind = config.model_type
    if kind == "trocr":
        positions = learned(config) if config.use_learned_position_embeddings else fixed_after_padding(config)
        norms = {"pre": False, "embedding_norm": bool(config.layernorm_embedding)}
        return stack_of(config, positions, "decoder", config.vocab_size, **norms)
    if kind == "mbart":
        return stack_of(config, learned(config), "decoder", config.vocab_size, pre=True, embedding_norm=True)
    raise UnsupportedModelError(f"decoder of the config is of the type {kind!r}; supported are trocr, mbart.")


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    assert model.decoder is not None
    stem, ends = "decoder.model.decoder", isinstance(model.decoder.blocks[0].placement, Pre)
    output = "decoder.lm_head" if ends else "decoder.output_projection"
    entries = [
        *tower_weights(model.encoder, "encoder"),
        Entry("decoder.embedding.tokens", (f"{stem}.embed_tokens.weight",), shard_axis=0),
        output_table(model, output),
        *stack_weights("decoder", model.decoder, replace(FAIRSEQ, stem=stem)),
    ]
    fixed = r"decoder\.model\.decoder\.embed_positions\.(weights|_float_tensor)"
    return WeightTable(tuple(entries), ignored=(*unread("encoder"), fixed), head=f"{output}.weight")


FAMILY = Family(
    name="TrOCR",
    architectures=("VisionEncoderDecoderModel",),
    brings="an image's text: an encoder of patches (ViT or DeiT), a decoder like BART's or mBART's",
    spec=spec,
    weights=weights,
)
