"""ALBERT: BERT's encoder over narrow vectors, whose layers are the same weights (arXiv:1909.11942)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import bert
from engine.model.families.common import linear
from engine.model.families.encoder_only import (
    OLD_NORMS,
    LayerNames,
    answer_weights,
    first_token_weights,
    masked_lm_weights,
    stack_weights,
    token_weights,
)
from engine.model.positions import Learned
from engine.model.spec import AnswerSpan, Classifier, MaskedLm, ModelSpec, Repeated
from engine.model.table import Family, WeightTable

_LAYER = LayerNames(
    queries="attention.query",
    keys="attention.key",
    values="attention.value",
    out="attention.dense",
    attention_norm="attention.LayerNorm",
    up="ffn",
    down="ffn_output",
    ffn_norm="full_layer_layer_norm",
)


def spec(config: Any) -> ModelSpec:
    layers, groups, inner = config.num_hidden_layers, config.num_hidden_groups, config.inner_group_num
    if layers % groups:
        raise UnsupportedModelError(
            f"num_hidden_layers of the config must be a multiple of num_hidden_groups {groups}, got {layers}: groups "
            "of layers that run unequally often are not implemented."
        )
    encoder = bert.stack(config, Learned(config.max_position_embeddings), config.embedding_size)
    encoder = replace(
        encoder,
        # The vectors are mapped even where they are as wide as the layers.
        embedding=replace(encoder.embedding, expansion=config.hidden_size),
        blocks=encoder.blocks[:1] * (groups * inner),
        repeated=Repeated(length=inner, times=layers // groups),
    )
    return ModelSpec(encoder=encoder, decoder=None, head=bert.head_of(config))


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    assert model.encoder.repeated is not None
    inner = model.encoder.repeated.length

    def layer(number: int) -> str:
        group, within = divmod(number, inner)
        return f"encoder.albert_layer_groups.{group}.albert_layers.{within}"

    entries = stack_weights(model, "albert", layers=layer, names=_LAYER)
    entries += linear("encoder.embedding.expansion", "albert.encoder.embedding_hidden_mapping_in", True, 0)
    ignored = [r"albert\.embeddings\.((position|token_type)_ids|token_type_embeddings\.weight)"]
    pooler = r"albert\.pooler\..*"
    match model.head:
        case MaskedLm():
            entries += masked_lm_weights(
                model.head, dense="predictions.dense", layer_norm="predictions.LayerNorm", output="predictions.decoder",
                bias="predictions.bias",
            )  # fmt: skip
            # The other head of pretraining, which tells the order of sentences.
            ignored += [pooler, r"sop_classifier\..*", r"predictions\.(decoder\.)?bias"]
        case Classifier(pooling=None):
            entries += token_weights("classifier")
            ignored.append(pooler)
        case Classifier():
            entries += first_token_weights("albert.pooler", "classifier")
        case AnswerSpan():
            entries += answer_weights()
            ignored.append(pooler)
        case _:
            ignored += [pooler, r"(predictions|sop_classifier|classifier|qa_outputs)\..*"]
    return WeightTable(
        tuple(entries),
        prefix="albert.",
        ignored=tuple(ignored),
        renamed=OLD_NORMS,
        head="predictions.decoder.weight" if isinstance(model.head, MaskedLm) else None,
    )


FAMILY = Family(
    name="ALBERT",
    architectures=tuple(f"Albert{kind}" for kind in ("ForQuestionAnswering", *bert.KINDS)),
    brings="BERT's encoder with one set of weights for all layers",
    spec=spec,
    weights=weights,
)
