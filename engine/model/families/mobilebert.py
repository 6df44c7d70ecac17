"""MobileBERT: layers within bottlenecks, vectors of three tokens, norms without statistics (arXiv:2004.02984)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, attention, even_head_dim, linear, norm, qkv, same_layers
from engine.model.families.encoder import PRETRAINED, TABLES, bert_heads, head_kind, head_weights, of
from engine.model.families.encoder_only import bert_head, check_settings, embedding_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Block, Bottleneck, Classifier, Dense, MaskedLm, ModelSpec, Neighbours, Post, Tokens
from engine.model.table import Entry, Family, Joined, Reversed, Transposed, WeightTable

_AFFINE = Norm("affine", 0.0, bias=True)


def spec(config: Any) -> ModelSpec:
    check_settings(config)
    _check(config)
    width = config.intra_bottleneck_size
    head_dim = even_head_dim(width, config.num_attention_heads)
    block = Block(
        placement=Post(_AFFINE, _AFFINE),
        attention=attention(
            config,
            kv_heads=config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            causal=False,
            bias=True,
        ),
        ffn=Dense(config.intermediate_size, activation(config.hidden_act), bias=True),
        bottleneck=Bottleneck(
            width=width,
            norm=_AFFINE,
            networks=config.num_feedforward_networks,
            values="entered" if config.use_bottleneck_attention else "whole",
        ),
    )
    mapped = config.trigram_input or config.embedding_size != config.hidden_size
    embedding = Tokens(
        vocab_size=config.vocab_size,
        width=config.embedding_size,
        neighbours=Neighbours(3 if config.trigram_input else 1, config.hidden_size) if mapped else None,
        positions=Learned(config.max_position_embeddings),
        token_types=config.type_vocab_size,
        norm=_AFFINE,
    )
    head = bert_head(config)
    match head:
        case MaskedLm():
            head = replace(head, width=config.hidden_size, beyond=config.hidden_size - config.embedding_size)
        case Classifier(pooling="cls") if not config.classifier_activation:
            head = replace(head, activation=None)
    return ModelSpec(encoder=same_layers(config, embedding, block), decoder=None, head=head)


def _check(config: Any) -> None:
    """Refuse settings that no published model has. Raises UnsupportedModelError: names the setting."""
    if not config.use_bottleneck:
        raise UnsupportedModelError(
            "use_bottleneck of the config must be true: layers without a bottleneck are not implemented."
        )
    if config.normalization_type != "no_norm":
        raise UnsupportedModelError(
            f"normalization_type of the config is {config.normalization_type!r}; implemented: no_norm."
        )
    if not (config.use_bottleneck_attention or config.key_query_shared_bottleneck):
        raise UnsupportedModelError(
            "The config sets neither use_bottleneck_attention nor key_query_shared_bottleneck; one of them must be "
            "true: queries and keys are made within the bottleneck."
        )
    if config.embedding_size > config.hidden_size:
        raise UnsupportedModelError(
            f"embedding_size of the config must be at most its hidden_size {config.hidden_size}, got "
            f"{config.embedding_size}."
        )


def weights(model: ModelSpec) -> WeightTable:
    assert isinstance(model.trunk.embedding, Tokens)
    entries = embedding_weights(model, "mobilebert")
    around = model.trunk.embedding.neighbours
    if around is not None:
        # The part for the next token comes first.
        name, how = "mobilebert.embeddings.embedding_transformation", Reversed(around.taps)
        entries += [
            Entry("encoder.embedding.neighbours.weight", (f"{name}.weight",), how),
            Entry("encoder.embedding.neighbours.bias", (f"{name}.bias",)),
        ]
    for i, block in enumerate(model.trunk.blocks):
        entries += _layer(f"encoder.blocks.{i}", f"mobilebert.encoder.layer.{i}", block)
    heads = bert_heads("mobilebert")
    more = head_weights(model.head, heads)
    match model.head:
        case MaskedLm(beyond=beyond) if beyond:
            more.append(Entry("head.beyond.weight", ("cls.predictions.dense.weight",), Transposed()))
        case Classifier(pooling="cls", activation=None):
            more = linear("head.output", "classifier", True)
    return WeightTable(
        tuple(entries + more),
        prefix="mobilebert.",
        ignored=(
            *heads.unread.get(head_kind(model.head), ()),
            rf"mobilebert\.{TABLES}",
            r"mobilebert\.embeddings\.embedding_transformation\..*",
            r"mobilebert\.encoder\.layer\.\d+\.bottleneck\.attention\..*",
            r"cls\.predictions\.dense\.weight",
        ),
        head="cls.predictions.decoder.weight" if isinstance(model.head, MaskedLm) else None,
    )


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    part = block.bottleneck
    assert part is not None

    def normed(ours: str, of: str, theirs: str) -> list[Entry]:
        """A matrix and the norm after it, which are stored side by side."""
        return [
            *linear(f"{target}.{ours}", f"{source}.{theirs}.dense", True),
            *norm(f"{target}.{of}", f"{source}.{theirs}.LayerNorm", bias=True),
        ]

    entries = normed("entrance", "entrance_norm", "bottleneck.input")
    own, inner = f"{source}.attention.self", f"{target}.attention.inner"
    if part.values == "whole":
        entries += normed("second_entrance", "second_norm", "bottleneck.attention")
        size = block.attention.heads * block.attention.head_dim
        entries += [
            *(
                Entry(f"{inner}.qkv.{kind}", (f"{own}.query.{kind}", f"{own}.key.{kind}"), Joined((size, size)))
                for kind in ("weight", "bias")
            ),
            *linear(f"{inner}.values", f"{own}.value", True),
        ]
    else:
        entries += qkv(f"{inner}.qkv", (f"{own}.query", f"{own}.key", f"{own}.value"), block.attention)
    entries += normed("attention.inner.out", "attention.outer", "attention.output")
    for i in range(part.networks):
        network = f"{target}.networks.{i}"
        stored = f"{source}.ffn.{i}." if i < part.networks - 1 else f"{source}."
        entries += [
            *linear(f"{network}.inner.up", f"{stored}intermediate.dense", True),
            *linear(f"{network}.inner.down", f"{stored}output.dense", True),
            *norm(f"{network}.outer", f"{stored}output.LayerNorm", bias=True),
        ]
    return entries + normed("exit", "exit_norm", "output.bottleneck")


FAMILY = Family(
    name="MobileBERT",
    architectures=of(PRETRAINED, "MobileBert"),
    brings="bottleneck layers, embeddings from three neighbouring tokens, norms without statistics",
    spec=spec,
    weights=weights,
)
