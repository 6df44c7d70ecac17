"""BigBird: BERT's encoder for long texts, whose tokens see some blocks of the others (arXiv:2007.14062)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import bert
from engine.model.families.common import activation, linear, norm
from engine.model.families.encoder_only import (
    OLD_NORMS,
    answer_span,
    first_token_weights,
    question_end,
    stack_weights,
    token_weights,
)
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import (
    AnswerSpan,
    Classifier,
    Dense,
    Head,
    ModelSpec,
    ResidualNetwork,
    SparseBlocks,
    Tokens,
)
from engine.model.table import Entry, Family, WeightTable

_FULL, _SPARSE = "original_full", "block_sparse"


def spec(config: Any) -> ModelSpec:
    encoder = bert.stack(config, Learned(config.max_position_embeddings))
    seen = blocks_of(config)
    layers = tuple(
        replace(block, attention=replace(block.attention, blocks=seen, qkv_bias=config.use_bias))
        for block in encoder.blocks
    )
    assert isinstance(encoder.embedding, Tokens)
    scale = config.hidden_size**0.5 if config.rescale_embeddings else 1.0
    embedding = replace(encoder.embedding, scale=scale)
    head = _head(config)
    if isinstance(head, AnswerSpan) and config.type_vocab_size > 1:
        embedding = replace(embedding, second_after=question_end(config))
    return ModelSpec(encoder=replace(encoder, embedding=embedding, blocks=layers), decoder=None, head=head)


def blocks_of(config: Any) -> SparseBlocks | None:
    """The blocks that the encoder's tokens see; None for all.

    Raises:
        UnsupportedModelError: attention_type names no way to choose them.
    """
    if config.attention_type not in (_FULL, _SPARSE):
        raise UnsupportedModelError(
            f"attention_type of the config must be {_SPARSE} or {_FULL}, got {config.attention_type!r}."
        )
    return SparseBlocks(config.block_size, config.num_random_blocks) if config.attention_type == _SPARSE else None


def _head(config: Any) -> Head:
    """The head of the architecture's name: BERT's, but for what classifies texts, and what finds answers."""
    if config.architectures[0].endswith("ForQuestionAnswering"):
        ffn = Dense(config.intermediate_size, activation(config.hidden_act), bias=True)
        network = ResidualNetwork(ffn, Norm("layer", config.layer_norm_eps, bias=True))
        return answer_span(config, network=network)
    head = bert.head_of(config)
    if isinstance(head, Classifier) and head.pooling is not None:
        return replace(head, activation=activation(config.hidden_act))
    return head


def weights(model: ModelSpec) -> WeightTable:
    entries, ignored = _head_weights(model)
    return WeightTable(
        (*stack_weights(model, "bert"), *entries),
        prefix="bert.",
        ignored=(*ignored, r"bert\.embeddings\.((position|token_type)_ids|token_type_embeddings\.weight)"),
        renamed=OLD_NORMS,
        head=bert.masked_table(model),
    )


def _head_weights(model: ModelSpec) -> tuple[list[Entry], list[str]]:
    """The weights of the head, and patterns of what may be left unused."""
    pooler = r"bert\.pooler\..*"
    match model.head:
        case AnswerSpan():
            return [
                *linear("head.network.inner.up", "qa_classifier.intermediate.dense", True, 0),
                *linear("head.network.inner.down", "qa_classifier.output.dense", True, 1),
                *norm("head.network.outer", "qa_classifier.output.LayerNorm", bias=True),
                *token_weights("qa_classifier.qa_outputs"),
            ], [pooler]
        case Classifier(pooling="cls"):
            return first_token_weights("classifier.dense", "classifier.out_proj"), [pooler]
        case _:
            entries, ignored = bert.head_weights(model, "bert")
            return entries, [*ignored, r"qa_classifier\..*"]


FAMILY = Family(
    name="BigBird",
    architectures=("BigBirdForQuestionAnswering", *(f"BigBird{kind}" for kind in bert.KINDS)),
    headless=("BigBirdModel",),
    brings="BERT's encoder for long texts: block-sparse attention",
    spec=spec,
    weights=weights,
)
