"""DeBERTa-v2 and v3: disentangled attention, on request a convolution beside the first layer (arXiv:2006.03654)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, linear, norm, qkv
from engine.model.positions import Disentangled, DistanceVectors, Learned
from engine.model.spec import (
    Attention,
    Block,
    Classifier,
    Convolution,
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
from engine.model.table import Entry, Family, Taps, WeightTable


def spec(config: Any) -> ModelSpec:
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    terms = config.pos_att_type or ()
    position, distances = None, None
    if config.relative_attention and ("c2p" in terms or "p2c" in terms):
        position = Disentangled("c2p" in terms, "p2c" in terms, shared=getattr(config, "share_att_key", False))
        distances = _distances(config, layer_norm)
    attention = _attention(config, position, ("c2p" in terms) + ("p2c" in terms))
    block = Block(
        placement=Post(layer_norm, layer_norm),
        attention=attention,
        ffn=Dense(config.intermediate_size, activation(config.hidden_act), bias=True),
    )
    first = replace(block, beside=_convolution(config, layer_norm))
    width = _table_width(config)
    encoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(
            vocab_size=config.vocab_size,
            width=width,
            positions=Learned(config.max_position_embeddings) if config.position_biased_input else None,
            token_types=config.type_vocab_size,
            norm=layer_norm,
            projection=None if width == config.hidden_size else config.hidden_size,
            projects_sum=width != config.hidden_size,
        ),
        blocks=(first, *(block,) * (config.num_hidden_layers - 1)),
        final_norm=None,
        distances=distances,
    )
    return ModelSpec(encoder=encoder, decoder=None, head=_head(config, layer_norm))


def _table_width(config: Any) -> int:
    width: int = getattr(config, "embedding_size", config.hidden_size)
    return width


def _attention(config: Any, position: Disentangled | None, terms: int) -> Attention:
    """Attention whose scores are scaled for their number of terms, which counts those of a model that has no
    relative attention, too."""
    heads = config.num_attention_heads
    head_dim = even_head_dim(config.hidden_size, heads)
    if (size := getattr(config, "attention_head_size", head_dim)) != head_dim:
        raise UnsupportedModelError(
            f"attention_head_size of the config is {size}, but its {heads} heads must share hidden_size "
            f"{config.hidden_size}: {head_dim} features each."
        )
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=(head_dim * (1 + terms)) ** -0.5,
        position=position,
        causal=False,
        qkv_bias=True,
        out_bias=True,
    )


def _distances(config: Any, layer_norm: Norm) -> DistanceVectors:
    longest = getattr(config, "max_relative_positions", -1)
    if longest < 1:
        longest = config.max_position_embeddings
    buckets = getattr(config, "position_buckets", -1)
    if buckets == 1 or longest - 1 == buckets // 2 > 0:
        raise UnsupportedModelError(
            f"position_buckets of the config is {buckets} and distances reach to {longest}: the buckets beyond half of "
            "them widen geometrically up to there, for which there must be 2 at least, and their half must not be the "
            "last distance. Use other position_buckets, or -1 for none."
        )
    norms = [kind.strip() for kind in getattr(config, "norm_rel_ebd", "none").lower().split("|")]
    return DistanceVectors(
        max_distance=longest,
        buckets=buckets if buckets > 0 else None,
        norm=layer_norm if "layer_norm" in norms else None,
    )


def _convolution(config: Any, layer_norm: Norm) -> Convolution | None:
    kernel = getattr(config, "conv_kernel_size", 0)
    if kernel <= 0:
        return None
    groups = getattr(config, "conv_groups", 1)
    if kernel % 2 == 0 or groups < 1 or config.hidden_size % groups:
        raise UnsupportedModelError(
            f"The config's convolution sees conv_kernel_size {kernel} tokens in conv_groups {groups}: the first must "
            f"be odd, and hidden_size {config.hidden_size} a multiple of the second."
        )
    return Convolution(kernel, activation(getattr(config, "conv_act", "tanh")), layer_norm, groups)


def _head(config: Any, layer_norm: Norm) -> Head:
    match config.architectures[0]:
        case "DebertaV2ForMaskedLM":
            width = _table_width(config)
            if not config.legacy and width != config.hidden_size:
                raise UnsupportedModelError(
                    f"legacy of the config is false, so its head reads the token table with hidden_size "
                    f"{config.hidden_size} features, but the table has embedding_size {width}."
                )
            return MaskedLm(
                # The newer head always reads the token table.
                tied=config.tie_word_embeddings or not config.legacy,
                activation=activation(config.hidden_act),
                norm=layer_norm,
                # The older head's first layer gives what the table has, the newer one's what it was given.
                width=None if config.legacy else config.hidden_size,
            )
        case "DebertaV2ForSequenceClassification":
            if config.pooler_hidden_size != config.hidden_size:
                raise UnsupportedModelError(
                    f"pooler_hidden_size of the config is {config.pooler_hidden_size}; the head reads and gives "
                    f"hidden_size {config.hidden_size} features, so both must be equal."
                )
            return Classifier(labels=config.num_labels, pooling="cls", activation=activation(config.pooler_hidden_act))
        case "DebertaV2ForTokenClassification":
            return Classifier(labels=config.num_labels, pooling=None)
        case _:
            return Pool()


# Heads of other tasks, among them the two of pretraining (v3's discriminator is mask_predictions), and what a config
# can switch off although it is stored.
_UNUSED = (
    r"(cls|lm_predictions|mask_predictions|pooler|classifier|qa_outputs)\..*",
    r"deberta\.embeddings\.position_(ids|embeddings\..*)",
    r"deberta\.encoder\.(rel_embeddings|LayerNorm)\..*",
)


# The older masked-language-model head's matrix.
_OUTPUT = "cls.predictions.decoder"


def weights(model: ModelSpec) -> WeightTable:
    return WeightTable(
        (*_stack_weights(model), *_head_weights(model)),
        prefix="deberta.",
        ignored=_UNUSED,
        head=f"{_OUTPUT}.weight" if isinstance(model.head, MaskedLm) and model.head.width is None else None,
    )


def _stack_weights(model: ModelSpec) -> list[Entry]:
    stack = model.encoder
    assert stack is not None
    assert isinstance(stack.embedding, Tokens)
    present = {
        "tokens": ("word_embeddings", True),
        "positions": ("position_embeddings", stack.embedding.positions is not None),
        "types": ("token_type_embeddings", stack.embedding.token_types > 0),
    }
    entries = [
        Entry(f"encoder.embedding.{ours}", (f"deberta.embeddings.{theirs}.weight",), shard_axis=0)
        for ours, (theirs, there) in present.items()
        if there
    ]
    if stack.embedding.projection is not None:
        entries += linear("encoder.embedding.projection", "deberta.embeddings.embed_proj", False, 0)
    entries += norm("encoder.embedding.norm", "deberta.embeddings.LayerNorm", bias=True)
    if stack.distances is not None:
        entries.append(Entry("encoder.distances.weight", ("deberta.encoder.rel_embeddings.weight",)))
        if stack.distances.norm is not None:
            entries += norm("encoder.distances.norm", "deberta.encoder.LayerNorm", bias=True)
    for i, block in enumerate(stack.blocks):
        target, source = f"encoder.blocks.{i}", f"deberta.encoder.layer.{i}"
        if block.beside is not None:
            kernel, conv = f"{target}.convolution.kernel", "deberta.encoder.conv.conv"
            entries += [
                Entry(f"{kernel}.weight", (f"{conv}.weight",), Taps(block.beside.kernel, block.beside.groups)),
                Entry(f"{kernel}.bias", (f"{conv}.bias",)),
                *norm(f"{target}.norm", "deberta.encoder.conv.LayerNorm", bias=True),
            ]
            target = f"{target}.inner"
        entries += _layer_weights(target, source, block.attention)
    return entries


def _layer_weights(target: str, source: str, attention: Attention) -> list[Entry]:
    own, inner = f"{source}.attention.self", f"{target}.attention.inner"
    entries = [
        *qkv(f"{inner}.qkv", (f"{own}.query_proj", f"{own}.key_proj", f"{own}.value_proj"), attention),
        *linear(f"{inner}.out", f"{source}.attention.output.dense", True, 1),
        *norm(f"{target}.attention.outer", f"{source}.attention.output.LayerNorm", bias=True),
        *linear(f"{target}.ffn.inner.up", f"{source}.intermediate.dense", True, 0),
        *linear(f"{target}.ffn.inner.down", f"{source}.output.dense", True, 1),
        *norm(f"{target}.ffn.outer", f"{source}.output.LayerNorm", bias=True),
    ]
    position = attention.position
    if isinstance(position, Disentangled) and not position.shared:
        if position.content_to_position:
            entries += linear(f"{inner}.distance_keys", f"{own}.pos_key_proj", True, 0)
        if position.position_to_content:
            entries += linear(f"{inner}.distance_queries", f"{own}.pos_query_proj", True, 0)
    return entries


def _head_weights(model: ModelSpec) -> list[Entry]:
    match model.head:
        case MaskedLm(tied=tied, width=None):
            return [*_masked_lm("cls.predictions.transform", _OUTPUT, "cls.predictions"), *_output_table(tied)]
        case MaskedLm():
            return _masked_lm("lm_predictions.lm_head", "lm_predictions.lm_head")
        case Classifier(pooling=None):
            return linear("head.output", "classifier", True, 0)
        case Classifier():
            return [*linear("head.dense", "pooler.dense", True, 0), *linear("head.output", "classifier", True, 0)]
    return []


def _masked_lm(layers: str, *biases: str) -> list[Entry]:
    """The first layer of a head under this name, and the second's bias under one of several."""
    return [
        *linear("head.dense", f"{layers}.dense", True, 0),
        *norm("head.norm", f"{layers}.LayerNorm", bias=True),
        *(Entry("head.output.bias", (f"{name}.bias",), shard_axis=0) for name in biases),
    ]


def _output_table(tied: bool) -> list[Entry]:
    """The older head's matrix, which may be stored instead of the token table that it is tied to."""
    target = "encoder.embedding.tokens" if tied else "head.output.weight"
    return [Entry(target, (f"{_OUTPUT}.weight",), shard_axis=0)]


FAMILY = Family(
    name="DeBERTa-v2",
    architectures=(
        "DebertaV2Model",
        "DebertaV2ForMaskedLM",
        "DebertaV2ForSequenceClassification",
        "DebertaV2ForTokenClassification",
    ),
    headless=("DebertaV2Model",),
    brings="disentangled attention, a convolution beside a layer",
    spec=spec,
    weights=weights,
)
