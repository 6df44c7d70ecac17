"""BERT: post-norm encoder with learned positions and segments (arXiv:1810.04805)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, linear, norm, qkv
from engine.model.positions import Learned
from engine.model.spec import (
    Attention,
    Block,
    Classifier,
    Dense,
    Head,
    MaskedLm,
    ModelSpec,
    Norm,
    Pool,
    Post,
    Stack,
    Tokens,
)
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    return ModelSpec(encoder=stack(config, Learned(config.max_position_embeddings)), decoder=None, head=_head(config))


def stack(config: Any, positions: Learned) -> Stack:
    """The encoder of a config of BERT's kind."""
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    heads = config.num_attention_heads
    head_dim = even_head_dim(config.hidden_size, heads)
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        raise UnsupportedModelError(
            f"position_embedding_type of the config is {config.position_embedding_type!r}; implemented: absolute."
        )
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError("The config sets is_decoder: as a decoder this architecture is not implemented.")
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        causal=False,
        qkv_bias=True,
        out_bias=True,
    )
    block = Block(
        placement=Post(layer_norm, layer_norm),
        attention=attention,
        ffn=Dense(config.intermediate_size, activation(config.hidden_act), bias=True),
    )
    return Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(
            vocab_size=config.vocab_size,
            width=config.hidden_size,
            positions=positions,
            token_types=config.type_vocab_size,
            norm=layer_norm,
        ),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=None,
    )


def _head(config: Any) -> Head:
    name = config.architectures[0]
    if name == "BertForMaskedLM":
        return MaskedLm(
            tied=config.tie_word_embeddings,
            activation=activation(config.hidden_act),
            norm=Norm("layer", config.layer_norm_eps, bias=True),
        )
    if name == "BertForSequenceClassification":
        return Classifier(labels=config.num_labels, pooling="cls", activation="tanh")
    if name == "BertForTokenClassification":
        return Classifier(labels=config.num_labels, pooling=None)
    return Pool()


def weights(model: ModelSpec) -> WeightTable:
    entries = stack_weights(model, "bert")
    ignored = [r"bert\.embeddings\.position_ids"]
    match model.head:
        case MaskedLm(tied=tied):
            source = "cls.predictions"
            entries += [
                *linear("head.dense", f"{source}.transform.dense", True, 0),
                *norm("head.norm", f"{source}.transform.LayerNorm", bias=True),
                Entry("head.output.bias", (f"{source}.bias",), shard_axis=0),
                Entry("head.output.bias", (f"{source}.decoder.bias",), shard_axis=0),
            ]
            if not tied:
                entries.append(Entry("head.output.weight", (f"{source}.decoder.weight",), shard_axis=0))
            # The other head of pretraining, and the pooler that it reads.
            ignored += [r"cls\.seq_relationship\..*", r"bert\.pooler\..*", r"cls\.predictions\.(decoder\.)?bias"]
        case Classifier(pooling=None):
            entries += linear("head.output", "classifier", True, 0)
            ignored.append(r"bert\.pooler\..*")
        case Classifier():
            entries += linear("head.dense", "bert.pooler.dense", True, 0)
            entries += linear("head.output", "classifier", True, 0)
        case _:
            ignored += [r"bert\.pooler\..*", r"cls\..*", r"classifier\..*", r"qa_outputs\..*"]
    return WeightTable(
        tuple(entries),
        prefix="bert.",
        ignored=tuple(ignored),
        # Checkpoints converted from TensorFlow.
        renamed=((r"\.gamma$", ".weight"), (r"\.beta$", ".bias")),
        head="cls.predictions.decoder.weight" if isinstance(model.head, MaskedLm) else None,
    )


def stack_weights(model: ModelSpec, source: str) -> list[Entry]:
    """The encoder's weights under BERT's names."""
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Tokens)
    embedding = model.encoder.embedding
    tables = {"tokens": "word_embeddings", "positions": "position_embeddings"}
    if embedding.token_types:
        tables["types"] = "token_type_embeddings"
    entries = [
        Entry(f"encoder.embedding.{ours}", (f"{source}.embeddings.{theirs}.weight",), shard_axis=0)
        for ours, theirs in tables.items()
    ]
    entries += norm("encoder.embedding.norm", f"{source}.embeddings.LayerNorm", bias=True)
    for i, block in enumerate(model.encoder.blocks):
        target, layer = f"encoder.blocks.{i}", f"{source}.encoder.layer.{i}"
        own = f"{layer}.attention.self"
        entries += [
            *qkv(f"{target}.attention.inner.qkv", (f"{own}.query", f"{own}.key", f"{own}.value"), block.attention),
            *linear(f"{target}.attention.inner.out", f"{layer}.attention.output.dense", True, 1),
            *norm(f"{target}.attention.outer", f"{layer}.attention.output.LayerNorm", bias=True),
            *linear(f"{target}.ffn.inner.up", f"{layer}.intermediate.dense", True, 0),
            *linear(f"{target}.ffn.inner.down", f"{layer}.output.dense", True, 1),
            *norm(f"{target}.ffn.outer", f"{layer}.output.LayerNorm", bias=True),
        ]
    return entries


FAMILY = Family(
    name="BERT",
    architectures=(
        "BertModel",
        "BertForMaskedLM",
        "BertForPreTraining",
        "BertForSequenceClassification",
        "BertForTokenClassification",
    ),
    headless=("BertModel",),
    brings="encoder, segments, heads that classify or fill masks",
    spec=spec,
    weights=weights,
)
