"""DeBERTa-v2 and v3: disentangled attention, and an optional convolution beside the first layer (arXiv:2006.03654)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, even_head_dim, linear, multi_head, norm
from engine.model.families.encoder import BERT_LAYER, EncoderNames, HeadNames, encoder_table
from engine.model.families.encoder_only import (
    answer_span,
    first_token_classifier,
    layer_target,
    post_norm_encoder,
    token_classifier,
)
from engine.model.families.names import LayerNames
from engine.model.normalisation import Norm
from engine.model.positions import Disentangled, DistanceVectors, Learned
from engine.model.spec import Attention, Convolution, Head, MaskedLm, ModelSpec, Pool, Tokens
from engine.model.table import Entry, Family, Taps, WeightTable


def spec(config: Any) -> ModelSpec:
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    terms = config.pos_att_type or ()
    position, distances = None, None
    if config.relative_attention and ("c2p" in terms or "p2c" in terms):
        position = Disentangled("c2p" in terms, "p2c" in terms, shared=getattr(config, "share_att_key", False))
        distances = _distances(config, layer_norm)
    attention = _attention(config, position, ("c2p" in terms) + ("p2c" in terms))
    convolution = _convolution(config, layer_norm)
    encoder = post_norm_encoder(config, embedding(config, layer_norm), layer_norm, attention=attention)
    first = (replace(block, beside=convolution) for block in encoder.blocks[:1])
    blocks = (*first, *encoder.blocks[1:])
    encoder = replace(encoder, blocks=blocks, distances=distances)
    return ModelSpec(encoder=encoder, decoder=None, head=head_of(config, layer_norm))


def embedding(config: Any, layer_norm: Norm) -> Tokens:
    """The embedding of a config like DeBERTa's."""
    width = _table_width(config)
    return Tokens(
        vocab_size=config.vocab_size,
        width=width,
        positions=Learned(config.max_position_embeddings) if config.position_biased_input else None,
        token_types=config.type_vocab_size,
        norm=layer_norm,
        projection=None if width == config.hidden_size else config.hidden_size,
        projects_sum=width != config.hidden_size,
    )


def _table_width(config: Any) -> int:
    width: int = getattr(config, "embedding_size", config.hidden_size)
    return width


def _attention(config: Any, position: Disentangled | None, terms: int) -> Attention:
    """Attention whose scores are scaled by the number of terms, even in a model without relative attention."""
    heads, head_dim = config.num_attention_heads, even_head_dim(config.hidden_size, config.num_attention_heads)
    if (size := getattr(config, "attention_head_size", head_dim)) != head_dim:
        raise UnsupportedModelError(
            f"attention_head_size of the config is {size}, but its {heads} heads must share hidden_size "
            f"{config.hidden_size}: {head_dim} features each."
        )
    return multi_head(config, scale=(head_dim * (1 + terms)) ** -0.5, position=position, causal=False)


def _distances(config: Any, layer_norm: Norm) -> DistanceVectors:
    longest = getattr(config, "max_relative_positions", -1)
    if longest < 1:
        longest = config.max_position_embeddings
    buckets = getattr(config, "position_buckets", -1)
    if buckets == 1 or longest - 1 == buckets // 2 > 0:
        raise UnsupportedModelError(
            f"position_buckets of the config is {buckets} and distances reach to {longest}: the buckets beyond half "
            "of them widen geometrically up to there, so at least 2 are needed, and half of them must not be the "
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


def head_of(config: Any, layer_norm: Norm) -> Head:
    """The head that the architecture's name ends with."""
    name = config.architectures[0]
    match name[name.find("For") :]:
        case "ForMaskedLM":
            width = _table_width(config)
            if not config.legacy and width != config.hidden_size:
                raise UnsupportedModelError(
                    f"legacy of the config is false, so its head reads the token table with hidden_size "
                    f"{config.hidden_size} features, but the table has embedding_size {width}."
                )
            return MaskedLm(
                # The newer head always uses the token table.
                tied=config.tie_word_embeddings or not config.legacy,
                activation=activation(config.hidden_act),
                norm=layer_norm,
                # The older head's first layer returns the table's width, the newer one's its input's width.
                width=None if config.legacy else config.hidden_size,
            )
        case "ForSequenceClassification":
            if config.pooler_hidden_size != config.hidden_size:
                raise UnsupportedModelError(
                    f"pooler_hidden_size of the config is {config.pooler_hidden_size}; the head reads and returns "
                    f"hidden_size {config.hidden_size} features, so both must be equal."
                )
            return first_token_classifier(config, activation(config.pooler_hidden_act))
        case "ForTokenClassification":
            return token_classifier(config)
        case "ForQuestionAnswering":
            return answer_span(config)
        case _:
            return Pool()


# Heads of other tasks, including the two of pretraining (v3's discriminator is mask_predictions), and parts that a
# config can disable although they are stored.
_UNUSED = (
    r"(cls|lm_predictions|mask_predictions|pooler|classifier|qa_outputs)\..*",
    r"deberta\.embeddings\.position_(ids|embeddings\..*)",
    r"deberta\.encoder\.(rel_embeddings|LayerNorm)\..*",
)
HEADS = HeadNames(
    masked=("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder"),
    masked_bias="cls.predictions.bias",
    first=("pooler.dense", "classifier"),
    always_unread=_UNUSED,
)
NEWER = ("lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "lm_predictions.lm_head")
LAYER = replace(BERT_LAYER, qkv=("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"))


def weights(model: ModelSpec) -> WeightTable:
    return table(model, LAYER, _own_weights(model))


def table(model: ModelSpec, layer: LayerNames, more: list[Entry]) -> WeightTable:
    """The weights of a model like DeBERTa, from the names in its layers and its parts besides BERT's."""
    assert isinstance(model.trunk.embedding, Tokens)
    newer = isinstance(model.head, MaskedLm) and model.head.width is not None
    heads = replace(HEADS, masked=NEWER, masked_bias=None) if newer else HEADS
    if model.trunk.embedding.projection is not None:
        more = [*more, *linear("encoder.embedding.projection", "deberta.embeddings.embed_proj", False)]
    names = EncoderNames(stem="deberta", layer=layer, heads=heads, unread=(), renamed=())
    found = encoder_table(model, names, tuple(more))
    # The newer head has no matrix that may be stored beside the token table.
    return replace(found, head=None) if newer else found


def _own_weights(model: ModelSpec) -> list[Entry]:
    """The weights of a stack's parts besides BERT's."""
    stack = model.trunk
    entries: list[Entry] = []
    if stack.distances is not None:
        entries.append(Entry("encoder.distances.weight", ("deberta.encoder.rel_embeddings.weight",)))
        if stack.distances.norm is not None:
            entries += norm("encoder.distances.norm", "deberta.encoder.LayerNorm", bias=True)
    for i, block in enumerate(stack.blocks):
        if block.beside is not None:
            target, source = f"encoder.blocks.{i}", "deberta.encoder.conv"
            taps = Taps(block.beside.kernel, block.beside.groups)
            entries += [
                Entry(f"{target}.convolution.kernel.weight", (f"{source}.conv.weight",), taps),
                Entry(f"{target}.convolution.kernel.bias", (f"{source}.conv.bias",)),
                *norm(f"{target}.norm", f"{source}.LayerNorm", bias=True),
            ]
        position = block.attention.position
        if isinstance(position, Disentangled) and not position.shared:
            target, source = f"{layer_target(i, block)}.attention.inner", f"deberta.encoder.layer.{i}.attention.self"
            if position.content_to_position:
                entries += linear(f"{target}.distance_keys", f"{source}.pos_key_proj", True)
            if position.position_to_content:
                entries += linear(f"{target}.distance_queries", f"{source}.pos_query_proj", True)
    return entries


FAMILY = Family(
    name="DeBERTa-v2",
    architectures=(
        "DebertaV2Model",
        "DebertaV2ForMaskedLM",
        "DebertaV2ForQuestionAnswering",
        "DebertaV2ForSequenceClassification",
        "DebertaV2ForTokenClassification",
    ),
    headless=("DebertaV2Model",),
    brings="disentangled attention, an optional convolution beside the first layer",
    spec=spec,
    weights=weights,
)
