"""LayoutLM: BERT's encoder over tokens and their places on a page (arXiv:1912.13318)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families import bert
from engine.model.families.encoder_only import OLD_NORMS, stack_weights
from engine.model.positions import Learned
from engine.model.spec import ModelSpec
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    encoder = bert.stack(config, Learned(config.max_position_embeddings))
    encoder = replace(encoder, embedding=replace(encoder.embedding, boxes=config.max_2d_position_embeddings))
    return ModelSpec(encoder=encoder, decoder=None, head=bert.head_of(config))


def weights(model: ModelSpec) -> WeightTable:
    more, ignored = bert.head_weights(model, "layoutlm")
    return WeightTable(
        (*stack_weights(model, "layoutlm"), *more),
        prefix="layoutlm.",
        ignored=(*ignored, r"layoutlm\.embeddings\.(position_ids|token_type_embeddings\.weight)"),
        renamed=OLD_NORMS,
        head=bert.masked_table(model),
    )


FAMILY = Family(
    name="LayoutLM",
    architectures=(
        "LayoutLMForMaskedLM",
        "LayoutLMForQuestionAnswering",
        "LayoutLMForSequenceClassification",
        "LayoutLMForTokenClassification",
        "LayoutLMModel",
    ),
    brings="BERT's encoder with the position of each token on its page",
    spec=spec,
    weights=weights,
)
