"""DistilBERT: BERT's encoder without segments, under names of its own (arXiv:1910.01108)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import activation
from engine.model.families.encoder_only import (
    OLD_NORMS,
    LayerNames,
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
from engine.model.spec import AnswerSpan, Classifier, Dense, MaskedLm, ModelSpec, Tokens
from engine.model.table import Family, WeightTable

_NORM = Norm("layer", 1e-12, bias=True)
_LAYER = LayerNames(
    queries="attention.q_lin",
    keys="attention.k_lin",
    values="attention.v_lin",
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    ffn_norm="output_layer_norm",
)


def spec(config: Any) -> ModelSpec:
    check_settings(config)
    encoder = post_norm_encoder(
        Tokens(
            vocab_size=config.vocab_size,
            width=config.dim,
            # With sinusoidal_pos_embds they are only not trained: checkpoints store them as any others.
            positions=Learned(config.max_position_embeddings),
            norm=_NORM,
        ),
        hidden_size=config.dim,
        layers=config.n_layers,
        heads=config.n_heads,
        ffn=Dense(config.hidden_dim, activation(config.activation), bias=True),
        layer_norm=_NORM,
    )
    masked = masked_lm(config, activation(config.activation), _NORM.eps)
    return ModelSpec(encoder=encoder, decoder=None, head=named_head(config, masked, "relu"))


def weights(model: ModelSpec) -> WeightTable:
    entries = stack_weights(model, "distilbert", layers="transformer.layer", names=_LAYER)
    ignored = [r"distilbert\.embeddings\.position_ids"]
    match model.head:
        case MaskedLm():
            entries += masked_lm_weights(
                model.head, dense="vocab_transform", layer_norm="vocab_layer_norm", output="vocab_projector"
            )
        case Classifier(pooling=None):
            entries += token_weights("classifier")
        case Classifier():
            entries += first_token_weights("pre_classifier", "classifier")
        case AnswerSpan():
            entries += answer_weights()
        case _:
            ignored += [r"vocab_(transform|layer_norm|projector)\..*", r"(pre_)?classifier\..*", r"qa_outputs\..*"]
    return WeightTable(
        tuple(entries),
        prefix="distilbert.",
        renamed=OLD_NORMS,
        ignored=tuple(ignored),
        head="vocab_projector.weight" if isinstance(model.head, MaskedLm) else None,
    )


FAMILY = Family(
    name="DistilBERT",
    architectures=(
        "DistilBertForMaskedLM",
        "DistilBertForQuestionAnswering",
        "DistilBertForSequenceClassification",
        "DistilBertForTokenClassification",
        "DistilBertModel",
    ),
    brings="BERT's encoder without segments",
    spec=spec,
    weights=weights,
)
