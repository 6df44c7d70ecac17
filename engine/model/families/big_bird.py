"""BigBird: BERT's encoder for long texts, whose tokens see some blocks of the others (arXiv:2007.14062)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, dense_network, linear, norm
from engine.model.families.encoder import PRETRAINED, EncoderNames, bert_heads, encoder, encoder_table, of
from engine.model.families.encoder_only import answer_span, bert_head, bert_stack, question_end, token_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import AnswerSpan, Classifier, Head, ModelSpec, ResidualNetwork, SparseBlocks, Stack, Tokens
from engine.model.table import WeightTable

_FULL, _SPARSE = "original_full", "block_sparse"


def _stack(config: Any) -> Stack:
    encoder = bert_stack(config, Learned(config.max_position_embeddings))
    seen = blocks_of(config)
    layers = tuple(
        replace(block, attention=replace(block.attention, sees=seen, qkv_bias=config.use_bias))
        for block in encoder.blocks
    )
    assert isinstance(encoder.embedding, Tokens)
    scale = config.hidden_size**0.5 if config.rescale_embeddings else 1.0
    embedding = replace(encoder.embedding, scale=scale)
    if config.architectures[0].endswith("ForQuestionAnswering") and config.type_vocab_size > 1:
        embedding = replace(embedding, second_after=question_end(config))
    return replace(encoder, embedding=embedding, blocks=layers)


def blocks_of(config: Any) -> SparseBlocks | None:
    """The blocks that the encoder's tokens see; None for all. Raises UnsupportedModelError: attention_type names an
    unknown selection."""
    if config.attention_type not in (_FULL, _SPARSE):
        raise UnsupportedModelError(
            f"attention_type of the config must be {_SPARSE} or {_FULL}, got {config.attention_type!r}."
        )
    return SparseBlocks(config.block_size, config.num_random_blocks) if config.attention_type == _SPARSE else None


def _head(config: Any) -> Head:
    """The head for the architecture's name: BERT's, except for classifiers of texts and models that find answers."""
    if config.architectures[0].endswith("ForQuestionAnswering"):
        network = ResidualNetwork(dense_network(config), Norm("layer", config.layer_norm_eps, bias=True))
        return answer_span(config, network=network)
    head = bert_head(config)
    if isinstance(head, Classifier) and head.pooling is not None:
        return replace(head, activation=activation(config.hidden_act))
    return head


POOLER = r"bert\.pooler\..*"
USUAL = bert_heads("bert").unread
NAMES = EncoderNames(
    stem="bert",
    heads=replace(
        bert_heads("bert"),
        first=("classifier.dense", "classifier.out_proj"),
        unread={
            "first": (POOLER,),
            "answer": (POOLER,),
            **{kind: (*USUAL[kind], r"qa_classifier\..*") for kind in ("masked", "each", "none")},
        },
    ),
)


def _weights(model: ModelSpec) -> WeightTable:
    table = encoder_table(model, NAMES)
    if not isinstance(model.head, AnswerSpan):
        return table
    answers = (
        *linear("head.network.inner.up", "qa_classifier.intermediate.dense", True),
        *linear("head.network.inner.down", "qa_classifier.output.dense", True),
        *norm("head.network.outer", "qa_classifier.output.LayerNorm", bias=True),
        *token_weights("qa_classifier.qa_outputs"),
    )
    return replace(table, entries=(*(e for e in table.entries if not e.target.startswith("head.")), *answers))


FAMILY = encoder(
    "BigBird",
    of(("ForQuestionAnswering", *PRETRAINED), "BigBird"),
    "BERT's encoder for long texts: block-sparse attention",
    headless=("BigBirdModel",),
    stack=_stack,
    head=_head,
    weights=_weights,
)
