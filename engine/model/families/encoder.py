"""A family of encoders as a row of a table: its stack and head, read from a config, and the names of its weights.

`encoders.py` contains the rows. Names that are left out are BERT's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.model.families.common import linear, norm
from engine.model.families.encoder_only import (
    answer_weights,
    embedding_weights,
    first_token_weights,
    layer_target,
    masked_lm_weights,
    token_weights,
)
from engine.model.families.names import LayerNames, layer_weights
from engine.model.positions import Learned
from engine.model.spec import AnswerSpan, Classifier, Head, MaskedLm, ModelSpec, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable

CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "Model")
KINDS = ("ForMaskedLM", *CLASSIFIERS)
PRETRAINED = ("ForMaskedLM", "ForPreTraining", *CLASSIFIERS)
ANSWERING = ("ForMaskedLM", "ForQuestionAnswering", *CLASSIFIERS)


def of(kinds: tuple[str, ...], *names: str) -> tuple[str, ...]:
    """BertForMaskedLM and the others, for Bert."""
    return tuple(f"{name}{kind}" for name in names for kind in kinds)


# The kind of an encoder's head, for `HeadNames.unread`.
HeadKind = Literal["masked", "first", "each", "answer", "none"]
# Buffers of old checkpoints, and a table that the config does not use.
TABLES = r"embeddings\.((position|token_type)_ids|token_type_embeddings\.weight)"
# Names of norms' parameters in checkpoints converted from TensorFlow.
OLD_NORMS = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNames:
    """Names of the weights of an encoder's heads."""

    masked: tuple[str, str, str]  # the dense layer, the norm and the output matrix of a masked-language-model head
    masked_bias: str | None = None  # another name of that matrix's bias
    first: tuple[str, str]  # the two layers over the first token, which classify a text
    each: str = "classifier"  # the layer over each token
    # patterns of names that no answer depends on (`WeightTable.ignored`), by the kind of the model's head
    unread: Mapping[HeadKind, tuple[str, ...]] = field(default_factory=dict)
    always_unread: tuple[str, ...] = ()  # such patterns for any head


def bert_heads(stem: str) -> HeadNames:
    """BERT's names of heads, with the prefix of the encoder's names."""
    pooler = rf"{stem}\.pooler\..*"
    return HeadNames(
        masked=("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"),
        masked_bias="cls.predictions.bias",
        first=(f"{stem}.pooler.dense", "classifier"),
        unread={
            # The other head of pretraining, and the pooler that it uses.
            "masked": (r"cls\.seq_relationship\..*", pooler, r"cls\.predictions\.(decoder\.)?bias"),
            "each": (pooler,),
            "answer": (pooler,),
            # ColBERT's matrix after the encoder is read with the files beside the model (`engine.model.retrieval`).
            "none": (pooler, r"cls\..*", r"classifier\..*", r"qa_outputs\..*", r"linear\.weight"),
        },
    )


def roberta_heads(stem: str) -> HeadNames:
    """RoBERTa's names of heads, with the prefix of the encoder's names."""
    other = (r"lm_head\..*",)
    return HeadNames(
        masked=("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
        masked_bias="lm_head.bias",
        first=("classifier.dense", "classifier.out_proj"),
        unread={
            "masked": (r"lm_head\.(decoder\.)?bias",),
            "first": other,
            "each": other,
            "answer": other,
            "none": (r"(lm_head|classifier|qa_outputs)\..*",),
        },
        # Old checkpoints contain buffers, and a pooler that no head uses.
        always_unread=(rf"{stem}\.embeddings\.position_ids", rf"{stem}\.pooler\..*"),
    )


GENERATOR_HEADS = HeadNames(
    masked=("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"),
    first=("classifier.dense", "classifier.out_proj"),
    unread={"none": (r"(generator_predictions|generator_lm_head|classifier|qa_outputs)\..*",)},
)

BERT_LAYER = LayerNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    ffn=("intermediate.dense", "output.dense"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Names of an encoder's weights."""

    stem: str  # the prefix of all names except the heads'. Checkpoints of the headless model leave it out.
    # embedding_norm, expansion, final_norm: their names after the stem, if the model has them
    embedding_norm: str = "embeddings.LayerNorm"
    expansion: str = ""
    # their name after the stem, or a function from a layer's index to it
    layers: str | Callable[[int], str] = "encoder.layer"
    layer: LayerNames = BERT_LAYER
    final_norm: str = ""
    heads: HeadNames | None = None  # names of the heads; None for BERT's
    unread: tuple[str, ...] = (TABLES,)  # patterns of further names that no answer depends on, after the stem and a dot
    renamed: tuple[tuple[str, str], ...] = OLD_NORMS  # older names (`WeightTable.renamed`)


def encoder(
    name: str,
    architectures: tuple[str, ...],
    brings: str,
    *,
    stack: Callable[[Any], Stack],
    head: Callable[[Any], Head],
    names: EncoderNames | None = None,
    headless: tuple[str, ...] = (),
    weights: Callable[[ModelSpec], WeightTable] | None = None,
) -> Family:
    """The family of these encoders.

    Args:
        name, architectures, brings, headless: see `Family`.
        stack, head: the encoder and its head, read from a config.
        weights: the table of weights, if names are not sufficient.
    """

    def spec(config: Any) -> ModelSpec:
        found = stack(config)
        return ModelSpec(encoder=found, decoder=None, head=head(config), context_length=_placed(found))

    def table(model: ModelSpec) -> WeightTable:
        assert names is not None
        return encoder_table(model, names)

    return Family(
        name=name,
        architectures=architectures,
        headless=headless,
        brings=brings,
        spec=spec,
        weights=weights or table,
    )


def _placed(stack: Stack) -> int | None:
    """The length of the longest input, if positions are counted from the row after the padding's."""
    positions = stack.embedding.positions
    counted = isinstance(positions, Learned) and positions.unplaced is not None
    return positions.size - positions.offset if isinstance(positions, Learned) and counted else None


def encoder_table(model: ModelSpec, names: EncoderNames, more: tuple[Entry, ...] = ()) -> WeightTable:
    """The weights of an encoder and its head under these names, and `more` entries."""
    stack, stem, heads = model.trunk, names.stem, names.heads or bert_heads(names.stem)
    assert isinstance(stack.embedding, Tokens)
    entries = embedding_weights(model, stem, names.embedding_norm)
    if stack.embedding.expansion is not None:
        entries += linear("encoder.embedding.expansion", f"{stem}.{names.expansion}", True)
    for i, block in enumerate(stack.blocks):
        layer = f"{names.layers}.{i}" if isinstance(names.layers, str) else names.layers(i)
        entries += layer_weights(layer_target(i, block), f"{stem}.{layer}", block, names.layer)
    if stack.final_norm is not None:
        entries += norm("encoder.final_norm", f"{stem}.{names.final_norm}", bias=True)
    entries += head_weights(model.head, heads)
    return WeightTable(
        (*entries, *more),
        prefix=f"{stem}.",
        ignored=(
            *heads.always_unread,
            *heads.unread.get(head_kind(model.head), ()),
            *(rf"{stem}\.{pattern}" for pattern in names.unread),
        ),
        renamed=names.renamed,
        head=f"{heads.masked[2]}.weight" if isinstance(model.head, MaskedLm) else None,
    )


def head_kind(head: Head) -> HeadKind:
    match head:
        case MaskedLm():
            return "masked"
        case Classifier(pooling=None):
            return "each"
        case Classifier():
            return "first"
        case AnswerSpan():
            return "answer"
        case _:
            return "none"


def head_weights(head: Head, names: HeadNames) -> list[Entry]:
    """The weights of a head under these names."""
    match head:
        case MaskedLm():
            dense, layer_norm, output = names.masked
            return masked_lm_weights(head, dense=dense, layer_norm=layer_norm, output=output, bias=names.masked_bias)
        case Classifier(pooling=None):
            return token_weights(names.each)
        case Classifier():
            return first_token_weights(*names.first)
        case AnswerSpan():
            return answer_weights()
        case _:
            return []
