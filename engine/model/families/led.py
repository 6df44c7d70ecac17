"""LED: BART whose encoder reads long texts, through a window in each layer and global tokens (arXiv:2004.05150, 7)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families import encoder_decoder
from engine.model.families.common import qkv
from engine.model.families.longformer import windows
from engine.model.positions import Learned
from engine.model.spec import FirstToken, GlobalTokens, ModelSpec, Stack, Tokens
from engine.model.table import Family, WeightTable

# The encoder's attention is stored under Longformer's names.
_OWN = r"\.self_attn\.longformer_self_attn"
_NAMES = (
    (r"^led\.", "model."),
    *((rf"{_OWN}\.{name}\.", f".self_attn.{name[0]}_proj.") for name in ("query", "key", "value")),
    (r"\.self_attn\.output\.", ".self_attn.out_proj."),
)


def spec(config: Any) -> ModelSpec:
    read, written = (Learned(getattr(config, f"max_{name}_position_embeddings")) for name in ("encoder", "decoder"))
    model = encoder_decoder.spec(config, read, pre=False, embedding_norm=True)
    assert model.encoder is not None
    assert model.decoder is not None
    # As transformers' summaries are made, and as the models were trained: the first token is global.
    blocks = tuple(
        replace(block, attention=replace(block.attention, window=window, global_tokens=GlobalTokens(FirstToken())))
        for block, window in zip(model.encoder.blocks, windows(config, config.encoder_layers), strict=True)
    )
    return replace(
        model,
        encoder=replace(_placed(model.encoder, read), blocks=blocks),
        decoder=_placed(model.decoder, written),
    )


def _placed(stack: Stack, positions: Learned) -> Stack:
    """The stack with these positions; its vectors are not scaled."""
    assert isinstance(stack.embedding, Tokens)
    return replace(stack, embedding=replace(stack.embedding, positions=positions, scale=1.0))


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    table = encoder_decoder.weights(model)
    entries = list(table.entries)
    for i, block in enumerate(model.encoder.blocks):
        source = f"model.encoder.layers.{i}.self_attn.longformer_self_attn"
        names = (f"{source}.query_global", f"{source}.key_global", f"{source}.value_global")
        entries += qkv(f"encoder.blocks.{i}.attention.inner.global_qkv", names, block.attention)
    return replace(table, entries=tuple(entries), renamed=_NAMES)


FAMILY = Family(
    name="LED",
    architectures=("LEDForConditionalGeneration", "LEDModel"),
    headless=("LEDModel",),
    brings="BART for long texts: windows and a global token in the encoder",
    spec=spec,
    weights=weights,
)
