"""ConvBERT: BERT's encoder in which half of the heads are convolutions (arXiv:2008.02496)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import bert
from engine.model.families.common import activation, linear, norm, qkv
from engine.model.families.encoder_only import (
    OLD_NORMS,
    embedding_weights,
    first_token_weights,
    masked_lm,
    masked_lm_weights,
    named_head,
    token_weights,
)
from engine.model.positions import Learned
from engine.model.spec import Attention, Block, Classifier, Dense, MaskedLm, ModelSpec, Spans, Tokens
from engine.model.table import Entry, Family, Groups, Reshaped, Same, Taps, WeightTable


def spec(config: Any) -> ModelSpec:
    encoder = bert.stack(config, Learned(config.max_position_embeddings), config.embedding_size)
    ratio = config.head_ratio
    heads = max(config.num_attention_heads // ratio, 1)
    if config.hidden_size % (2 * heads):
        raise UnsupportedModelError(
            f"The config has {config.hidden_size} hidden features, but {heads} attention heads and as "
            "many convolution heads must share them evenly."
        )
    if config.conv_kernel_size % 2 == 0:
        raise UnsupportedModelError(
            "conv_kernel_size of the config must be odd, so that a token is in the middle; got "
            f"{config.conv_kernel_size}."
        )
    for name in ("hidden_size", "intermediate_size"):
        if getattr(config, name) % config.num_groups:
            raise UnsupportedModelError(
                f"{name} of the config must be a multiple of its num_groups {config.num_groups}, got "
                f"{getattr(config, name)}."
            )
    head_dim = config.hidden_size // heads // 2
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        causal=False,
        qkv_bias=True,
        out_bias=True,
        spans=Spans(config.conv_kernel_size),
    )
    act = activation(config.hidden_act)
    head = named_head(config, masked_lm(config, "gelu", config.layer_norm_eps), act)
    ffn = Dense(config.intermediate_size, act, bias=True, groups=config.num_groups)
    blocks = tuple(replace(block, attention=attention, ffn=ffn) for block in encoder.blocks)
    return ModelSpec(encoder=replace(encoder, blocks=blocks), decoder=None, head=head)


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Tokens)
    entries = embedding_weights(model, "convbert")
    if model.encoder.embedding.expansion is not None:
        entries += linear("encoder.embedding.expansion", "convbert.embeddings_project", True, 0)
    for i, block in enumerate(model.encoder.blocks):
        entries += _layer(f"encoder.blocks.{i}", f"convbert.encoder.layer.{i}", block, model.encoder.hidden_size)
    ignored = [r"convbert\.embeddings\.((position|token_type)_ids|token_type_embeddings\.weight)"]
    match model.head:
        case MaskedLm():
            entries += masked_lm_weights(
                model.head,
                dense="generator_predictions.dense",
                layer_norm="generator_predictions.LayerNorm",
                output="generator_lm_head",
            )
        case Classifier(pooling=None):
            entries += token_weights("classifier")
        case Classifier():
            entries += first_token_weights("classifier.dense", "classifier.out_proj")
        case _:
            ignored.append(r"(generator_predictions|generator_lm_head|classifier|qa_outputs)\..*")
    return WeightTable(
        tuple(entries),
        prefix="convbert.",
        renamed=OLD_NORMS,
        ignored=tuple(ignored),
        head="generator_lm_head.weight" if isinstance(model.head, MaskedLm) else None,
    )


def _layer(target: str, source: str, block: Block, features: int) -> list[Entry]:
    attention, stored = f"{target}.attention.inner", f"{source}.attention.self"
    part, ffn = block.attention, block.ffn
    assert part.spans is not None
    assert isinstance(ffn, Dense)
    width, separable = part.heads * part.head_dim, f"{stored}.key_conv_attn_layer"
    grouped = Groups(ffn.groups) if ffn.groups > 1 else Same()
    return [
        *qkv(f"{attention}.qkv", (f"{stored}.query", f"{stored}.key", f"{stored}.value"), part),
        Entry(
            f"{attention}.spans.neighbours",
            (f"{separable}.depthwise.weight",),
            Reshaped(((features, 1, part.spans.kernel),)),
        ),
        Entry(f"{attention}.spans.mix.weight", (f"{separable}.pointwise.weight",), Taps(1)),
        Entry(f"{attention}.spans.mix.bias", (f"{separable}.bias",), Reshaped(((width, 1),))),
        *linear(f"{attention}.spans.scores", f"{stored}.conv_kernel_layer", True, 0),
        *linear(f"{attention}.spans.values", f"{stored}.conv_out_layer", True, 0),
        *linear(f"{attention}.out", f"{source}.attention.output.dense", True, 1),
        *norm(f"{target}.attention.outer", f"{source}.attention.output.LayerNorm", bias=True),
        Entry(f"{target}.ffn.inner.up.weight", (f"{source}.intermediate.dense.weight",), grouped, 0),
        Entry(f"{target}.ffn.inner.up.bias", (f"{source}.intermediate.dense.bias",), shard_axis=0),
        Entry(f"{target}.ffn.inner.down.weight", (f"{source}.output.dense.weight",), grouped, 1),
        Entry(f"{target}.ffn.inner.down.bias", (f"{source}.output.dense.bias",)),
        *norm(f"{target}.ffn.outer", f"{source}.output.LayerNorm", bias=True),
    ]


FAMILY = Family(
    name="ConvBERT",
    architectures=tuple(f"ConvBert{kind}" for kind in bert.KINDS if kind != "ForPreTraining"),
    brings="BERT's encoder; half of the heads are convolutions",
    spec=spec,
    weights=weights,
)
