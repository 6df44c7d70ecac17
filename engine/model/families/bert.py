"""BERT: post-norm encoder with learned positions and segments (arXiv:1810.04805)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation
from engine.model.families.encoder_only import (
    OLD_NORMS,
    answer_weights,
    check_settings,
    first_token_weights,
    masked_lm,
    masked_lm_weights,
    named_head,
    post_norm_encoder,
    stack_weights,
    token_weights,
)
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import AnswerSpan, Classifier, Dense, MaskedLm, ModelSpec, Stack, Tokens
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    masked = masked_lm(config, activation(config.hidden_act), config.layer_norm_eps)
    return ModelSpec(
        encoder=stack(config, Learned(config.max_position_embeddings)),
        decoder=None,
        head=named_head(config, masked, "tanh", ("ForMaskedLM", "ForPreTraining")),
    )


def stack(config: Any, positions: Learned, width: int | None = None) -> Stack:
    """The encoder of a config of BERT's kind.

    Args:
        width: features of the vectors that it begins with, hidden_size by default.

    Raises:
        UnsupportedModelError: a setting that no part expresses.
    """
    check_settings(config)
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    width = width or config.hidden_size
    return post_norm_encoder(
        Tokens(
            vocab_size=config.vocab_size,
            width=width,
            positions=positions,
            token_types=config.type_vocab_size,
            norm=layer_norm,
            expansion=None if width == config.hidden_size else config.hidden_size,
        ),
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        ffn=Dense(config.intermediate_size, activation(config.hidden_act), bias=True),
        layer_norm=layer_norm,
    )


def weights(model: ModelSpec) -> WeightTable:
    entries = stack_weights(model, "bert")
    # Buffers of old checkpoints, and a table of no rows where the model has no segments.
    ignored = [r"bert\.embeddings\.(position|token_type)_ids", r"bert\.embeddings\.token_type_embeddings\.weight"]
    match model.head:
        case MaskedLm():
            entries += masked_lm_weights(
                model.head,
                dense="cls.predictions.transform.dense",
                layer_norm="cls.predictions.transform.LayerNorm",
                output="cls.predictions.decoder",
                bias="cls.predictions.bias",
            )
            # The other head of pretraining, and the pooler that it reads.
            ignored += [r"cls\.seq_relationship\..*", r"bert\.pooler\..*", r"cls\.predictions\.(decoder\.)?bias"]
        case Classifier(pooling=None):
            entries += token_weights("classifier")
            ignored.append(r"bert\.pooler\..*")
        case Classifier():
            entries += first_token_weights("bert.pooler.dense", "classifier")
        case AnswerSpan():
            entries += answer_weights()
            ignored.append(r"bert\.pooler\..*")
        case _:
            ignored += [r"bert\.pooler\..*", r"cls\..*", r"classifier\..*", r"qa_outputs\..*"]
    return WeightTable(
        tuple(entries),
        prefix="bert.",
        ignored=tuple(ignored),
        renamed=OLD_NORMS,
        head="cls.predictions.decoder.weight" if isinstance(model.head, MaskedLm) else None,
    )


FAMILY = Family(
    name="BERT",
    architectures=(
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForQuestionAnswering",
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertModel",
    ),
    brings="encoder, learned positions, segments",
    spec=spec,
    weights=weights,
)
