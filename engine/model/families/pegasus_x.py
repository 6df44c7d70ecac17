"""PEGASUS-X: PEGASUS whose encoder reads long texts in blocks, with learned vectors beside the tokens
(arXiv:2208.04347)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import encoder_decoder
from engine.model.families.common import norm
from engine.model.positions import SpannedSinusoidal
from engine.model.spec import Attention, Block, GlobalStream, ModelSpec
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    size, staggered = config.block_size, config.stagger_local_blocks
    if staggered and size % 2:
        raise UnsupportedModelError(
            f"block_size of the config must be even where stagger_local_blocks is true, since blocks of every other "
            f"layer begin half a block earlier; got {size}."
        )
    positions = SpannedSinusoidal(config.max_position_embeddings)
    model = encoder_decoder.spec(config, positions, pre=True, embedding_norm=False, head_bias=False)
    assert model.encoder is not None
    assert model.decoder is not None
    read = tuple(
        _unbiased(block, GlobalStream(size, size // 2 if staggered and i % 2 else 0, encoder_decoder.NORM))
        for i, block in enumerate(model.encoder.blocks)
    )
    return replace(
        model,
        encoder=replace(model.encoder, blocks=read, global_vectors=config.num_global_tokens),
        decoder=replace(model.decoder, blocks=tuple(map(_unbiased, model.decoder.blocks))),
    )


def _unbiased(block: Block, stream: GlobalStream | None = None) -> Block:
    """The block whose attention has no biases."""

    def without(part: Attention) -> Attention:
        return replace(part, qkv_bias=False, out_bias=False)

    cross = None if block.cross is None else without(block.cross)
    return replace(block, attention=replace(without(block.attention), stream=stream), cross=cross)


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    table = encoder_decoder.weights(model)
    entries = [*table.entries, Entry("encoder.global_vectors", ("model.encoder.embed_global.weight",))]
    for i in range(len(model.encoder.blocks)):
        source = f"model.encoder.layers.{i}.global_self_attn_layer_norm"
        entries += norm(f"encoder.blocks.{i}.attention.inner.global_norm", source, bias=True)
    return replace(table, entries=tuple(entries))


FAMILY = Family(
    name="PEGASUS-X",
    architectures=("PegasusXForConditionalGeneration", "PegasusXModel"),
    headless=("PegasusXModel",),
    brings="PEGASUS for long texts: blockwise attention, and global vectors that all tokens see",
    spec=spec,
    weights=weights,
)
