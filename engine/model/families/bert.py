"""BERT and ERNIE: post-norm encoder with learned positions and segments (arXiv:1810.04805, arXiv:2107.02137)."""

from __future__ import annotations

from dataclasses import replace
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
from engine.model.spec import AnswerSpan, Classifier, Dense, Head, MaskedLm, ModelSpec, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    encoder = stack(config, Learned(config.max_position_embeddings))
    if getattr(config, "use_task_id", False):
        encoder = replace(encoder, embedding=replace(encoder.embedding, tasks=config.task_type_vocab_size))
    return ModelSpec(encoder=encoder, decoder=None, head=head_of(config))


def head_of(config: Any) -> Head:
    """The head of a config of BERT's kind."""
    masked = masked_lm(config, activation(config.hidden_act), config.layer_norm_eps)
    return named_head(config, masked, "tanh", ("ForMaskedLM", "ForPreTraining"))


def stack(config: Any, positions: Learned | None, width: int | None = None) -> Stack:
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
    more, ignored = head_weights(model, "bert")
    # Buffers of old checkpoints, and tables that the config says are not used.
    ignored += [
        r"bert\.embeddings\.(position|token_type)_ids",
        r"bert\.embeddings\.(token|task)_type_embeddings\.weight",
    ]
    return WeightTable(
        tuple(entries + more),
        prefix="bert.",
        ignored=tuple(ignored),
        renamed=(*OLD_NORMS, (r"^ernie\.", "bert.")),
        head=masked_table(model),
    )


def head_weights(model: ModelSpec, source: str) -> tuple[list[Entry], list[str]]:
    """The weights of a head as BERT names them, and patterns of what may be left unused.

    Args:
        source: what the encoder's names begin with.
    """
    pooler = rf"{source}\.pooler\..*"
    match model.head:
        case MaskedLm():
            entries = masked_lm_weights(
                model.head,
                dense="cls.predictions.transform.dense",
                layer_norm="cls.predictions.transform.LayerNorm",
                output="cls.predictions.decoder",
                bias="cls.predictions.bias",
            )
            # The other head of pretraining, and the pooler that it reads.
            return entries, [r"cls\.seq_relationship\..*", pooler, r"cls\.predictions\.(decoder\.)?bias"]
        case Classifier(pooling=None):
            return token_weights("classifier"), [pooler]
        case Classifier():
            return first_token_weights(f"{source}.pooler.dense", "classifier"), []
        case AnswerSpan():
            return answer_weights(), [pooler]
        case _:
            # ColBERT's matrix after the encoder is read with what lies beside the model (`engine.model.retrieval`).
            return [], [pooler, r"cls\..*", r"classifier\..*", r"qa_outputs\..*", r"linear\.weight"]


def masked_table(model: ModelSpec) -> str | None:
    """The name under which a masked-language-model head's matrix may be stored although it is tied."""
    return "cls.predictions.decoder.weight" if isinstance(model.head, MaskedLm) else None


KINDS = ("ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification", "Model")

FAMILY = Family(
    name="BERT and ERNIE",
    architectures=(
        "HF_ColBERT",
        *(f"{name}{kind}" for name in ("Bert", "Ernie") for kind in ("ForQuestionAnswering", *KINDS)),
    ),
    brings="encoder with learned positions and segments; ERNIE adds task embeddings",
    spec=spec,
    weights=weights,
)
