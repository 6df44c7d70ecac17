"""Longformer: RoBERTa's encoder with a window in each layer, and global tokens (arXiv:2004.05150)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families.common import qkv
from engine.model.families.encoder import ANSWERING, EncoderNames, encoder, encoder_table, of, roberta_heads
from engine.model.families.encoder_only import bert_stack, positions_after_padding, question_end, roberta_head
from engine.model.spec import BeforeToken, Block, FirstToken, GlobalTokens, ModelSpec, Stack
from engine.model.table import Entry, WeightTable


def _stack(config: Any) -> Stack:
    encoder = bert_stack(config, positions_after_padding(config, config.pad_token_id))
    chosen = _global_tokens(config)
    blocks = tuple(
        replace(block, attention=replace(block.attention, sees=_seen(chosen, reach)))
        for block, reach in zip(encoder.blocks, reaches(config, len(encoder.blocks)), strict=True)
    )
    return replace(encoder, blocks=blocks)


def _seen(chosen: FirstToken | BeforeToken | None, reach: int) -> Window | GlobalTokens:
    return Window(reach, reach) if chosen is None else GlobalTokens(chosen, reach)


def reaches(config: Any, layers: int) -> list[int]:
    """The tokens of each layer's window on either side: half of `attention_window`. Raises
    UnsupportedModelError if the setting does not cover each layer."""
    sizes = config.attention_window
    sizes = [sizes] * layers if isinstance(sizes, int) else list(sizes)
    if len(sizes) != layers or any(size < 2 or size % 2 for size in sizes):
        raise UnsupportedModelError(
            f"attention_window of the config must be an even number of tokens, or one for each of the {layers} layers, "
            f"got {config.attention_window}."
        )
    return [size // 2 for size in sizes]


def _global_tokens(config: Any) -> FirstToken | BeforeToken | None:
    """The tokens that transformers makes global by itself: the token that classifies a text, and the tokens of
    questions."""
    name = config.architectures[0]
    if name.endswith("ForSequenceClassification"):
        return FirstToken()
    if not name.endswith("ForQuestionAnswering"):
        return None
    return BeforeToken(question_end(config))


def global_weights(block: Block, target: str, source: str) -> list[Entry]:
    """The projections for global tokens of a layer's attention, from our name and the stored name."""
    names = (f"{source}.query_global", f"{source}.key_global", f"{source}.value_global")
    return qkv(f"{target}.attention.inner.global_qkv", names, block.attention)


def _weights(model: ModelSpec) -> WeightTable:
    more: list[Entry] = []
    for i, block in enumerate(model.trunk.blocks):
        if isinstance(block.attention.sees, GlobalTokens):
            more += global_weights(block, f"encoder.blocks.{i}", f"longformer.encoder.layer.{i}.attention.self")
    unread = () if more else (r"encoder\.layer\.\d+\.attention\.self\.(query|key|value)_global\..*",)
    names = EncoderNames(stem="longformer", heads=roberta_heads("longformer"), unread=unread)
    return encoder_table(model, names, tuple(more))


FAMILY = encoder(
    "Longformer",
    of(("Model", *ANSWERING[:-1]), "Longformer"),
    "long texts: sliding windows, global tokens with their own projections",
    headless=("LongformerModel",),
    stack=_stack,
    head=roberta_head,
    weights=_weights,
)
