"""Longformer: RoBERTa's encoder with a window in each layer, and global tokens (arXiv:2004.05150)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families.bert import stack
from engine.model.families.common import qkv
from engine.model.families.encoder_only import OLD_NORMS, positions_after_padding, question_end, stack_weights
from engine.model.families.roberta import head_of, head_weights
from engine.model.spec import BeforeToken, FirstToken, GlobalTokens, MaskedLm, ModelSpec
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    positions = positions_after_padding(config, config.pad_token_id)
    encoder = stack(config, positions)
    chosen = _global_tokens(config)
    blocks = tuple(
        replace(block, attention=replace(block.attention, window=window, global_tokens=chosen))
        for block, window in zip(encoder.blocks, windows(config, len(encoder.blocks)), strict=True)
    )
    return ModelSpec(
        encoder=replace(encoder, blocks=blocks),
        decoder=None,
        head=head_of(config),
        context_length=positions.size - positions.offset,
    )


def windows(config: Any, layers: int) -> list[Window]:
    """The window of each layer: half of `attention_window` to either side.

    Raises:
        UnsupportedModelError: the setting does not say that of each layer.
    """
    sizes = config.attention_window
    sizes = [sizes] * layers if isinstance(sizes, int) else list(sizes)
    if len(sizes) != layers or any(size < 2 or size % 2 for size in sizes):
        raise UnsupportedModelError(
            f"attention_window of the config must be an even number of tokens, or one for each of the {layers} layers, "
            f"got {config.attention_window}."
        )
    return [Window(size // 2, size // 2) for size in sizes]


def _global_tokens(config: Any) -> GlobalTokens | None:
    """The tokens that transformers makes global by itself: what a text is classified by, and questions."""
    name = config.architectures[0]
    if name.endswith("ForSequenceClassification"):
        return GlobalTokens(FirstToken())
    if not name.endswith("ForQuestionAnswering"):
        return None
    return GlobalTokens(BeforeToken(question_end(config)))


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    entries, ignored = head_weights(model, "longformer")
    entries += stack_weights(model, "longformer")
    for i, block in enumerate(model.encoder.blocks):
        source = f"longformer.encoder.layer.{i}.attention.self"
        names = (f"{source}.query_global", f"{source}.key_global", f"{source}.value_global")
        if block.attention.global_tokens is not None:
            entries += qkv(f"encoder.blocks.{i}.attention.inner.global_qkv", names, block.attention)
    if model.encoder.blocks[0].attention.global_tokens is None:
        ignored += (r"longformer\.encoder\.layer\.\d+\.attention\.self\.(query|key|value)_global\..*",)
    return WeightTable(
        tuple(entries),
        prefix="longformer.",
        renamed=OLD_NORMS,
        ignored=ignored,
        head="lm_head.decoder.weight" if isinstance(model.head, MaskedLm) else None,
    )


_KINDS = ("Model", "ForMaskedLM", "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")

FAMILY = Family(
    name="Longformer",
    architectures=tuple(f"Longformer{kind}" for kind in _KINDS),
    headless=("LongformerModel",),
    brings="long texts: sliding windows, global tokens with their own projections",
    spec=spec,
    weights=weights,
)
