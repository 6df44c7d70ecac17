"""ELECTRA: BERT's encoder over vectors of another width, generators and discriminators (arXiv:2003.10555)."""

from __future__ import annotations

from typing import Any

from engine.model.families.bert import stack
from engine.model.families.common import linear
from engine.model.families.encoder_only import (
    OLD_NORMS,
    answer_weights,
    first_token_weights,
    masked_lm,
    masked_lm_weights,
    named_head,
    stack_weights,
    token_weights,
)
from engine.model.positions import Learned
from engine.model.spec import AnswerSpan, Classifier, MaskedLm, ModelSpec, Tokens
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    encoder = stack(config, Learned(config.max_position_embeddings), config.embedding_size)
    masked = masked_lm(config, "gelu", config.layer_norm_eps)  # GELU in all heads, whatever hidden_act says
    return ModelSpec(encoder=encoder, decoder=None, head=named_head(config, masked, "gelu"))


def weights(model: ModelSpec) -> WeightTable:
    entries = stack_weights(model, "electra")
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Tokens)
    if model.encoder.embedding.expansion is not None:
        entries += linear("encoder.embedding.expansion", "electra.embeddings_project", True, 0)
    ignored = [
        r"electra\.embeddings\.((position|token_type)_ids|token_type_embeddings\.weight)",
        # What tells replaced tokens from others in pretraining.
        r"discriminator_predictions\..*",
    ]
    match model.head:
        case MaskedLm():
            entries += masked_lm_weights(
                model.head,
                dense="generator_predictions.dense",
                layer_norm="generator_predictions.LayerNorm",
                output="generator_lm_head",
            )
        case Classifier(pooling=None):
            entries += token_weights("classifier")
        case Classifier():
            entries += first_token_weights("classifier.dense", "classifier.out_proj")
        case AnswerSpan():
            entries += answer_weights()
        case _:
            ignored.append(r"(generator_predictions|generator_lm_head|classifier|qa_outputs)\..*")
    return WeightTable(
        tuple(entries),
        prefix="electra.",
        renamed=OLD_NORMS,
        ignored=tuple(ignored),
        head="generator_lm_head.weight" if isinstance(model.head, MaskedLm) else None,
    )


FAMILY = Family(
    name="ELECTRA",
    architectures=(
        "ElectraForMaskedLM",
        "ElectraForPreTraining",
        "ElectraForQuestionAnswering",
        "ElectraForSequenceClassification",
        "ElectraForTokenClassification",
        "ElectraModel",
    ),
    brings="BERT's encoder with narrower embeddings",
    spec=spec,
    weights=weights,
)
