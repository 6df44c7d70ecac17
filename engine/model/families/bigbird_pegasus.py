"""BigBird-Pegasus: encoder and decoder with norms before sublayers, whose encoder reads long texts as BigBird does
(arXiv:2007.14062, 4.1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families import encoder_decoder
from engine.model.families.big_bird import blocks_of
from engine.model.positions import Learned
from engine.model.spec import Block, ModelSpec
from engine.model.table import Family, WeightTable

# The encoder's attention is stored under BERT's names, and the norm at a stack's end as if it were at its beginning.
_NAMES = (
    *((rf"\.self_attn\.self\.{name}\.", f".self_attn.{name[0]}_proj.") for name in ("query", "key", "value")),
    (r"\.self_attn\.output\.", ".self_attn.out_proj."),
    (r"\.layernorm_embedding\.", ".layer_norm."),
)


def spec(config: Any) -> ModelSpec:
    positions = Learned(config.max_position_embeddings)
    model = encoder_decoder.spec(config, positions, pre=True, embedding_norm=False)
    assert model.encoder is not None
    assert model.decoder is not None
    seen = blocks_of(config)

    def biased(block: Block) -> Block:
        own, cross = (
            None if part is None else replace(part, qkv_bias=config.use_bias, out_bias=config.use_bias)
            for part in (block.attention, block.cross)
        )
        assert own is not None
        return replace(block, attention=own, cross=cross)

    read = tuple(biased(replace(b, attention=replace(b.attention, blocks=seen))) for b in model.encoder.blocks)
    return replace(
        model,
        encoder=replace(model.encoder, blocks=read),
        decoder=replace(model.decoder, blocks=tuple(map(biased, model.decoder.blocks))),
    )


def weights(model: ModelSpec) -> WeightTable:
    return replace(encoder_decoder.weights(model), renamed=_NAMES)


FAMILY = Family(
    name="BigBird-Pegasus",
    architectures=("BigBirdPegasusForConditionalGeneration", "BigBirdPegasusModel"),
    headless=("BigBirdPegasusModel",),
    brings="PEGASUS for long texts: BigBird's blocks in the encoder, learned positions",
    spec=spec,
    weights=weights,
)
