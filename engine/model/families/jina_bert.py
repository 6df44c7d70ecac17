"""Jina v2: BERT's encoder with ALiBi on either side and a gated feed-forward network (arXiv:2310.19923)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import bert
from engine.model.families.alibi import slopes
from engine.model.families.common import even_head_dim, linear, norm, qkv
from engine.model.families.encoder_only import BERT_LAYER, check_settings, embedding_weights
from engine.model.normalisation import Norm
from engine.model.positions import TwoSidedSlopes
from engine.model.spec import Activation, Attention, Block, Gated, ModelSpec, Post, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable

_GATES: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}


def spec(config: Any) -> ModelSpec:
    if getattr(config, "position_embedding_type", None) != "alibi":
        raise UnsupportedModelError(
            "position_embedding_type of the config must be 'alibi' for this family, got "
            f"{getattr(config, 'position_embedding_type', None)!r}."
        )
    kind = getattr(config, "feed_forward_type", None)
    if kind not in _GATES:
        raise UnsupportedModelError(f"feed_forward_type of the config is {kind!r}; implemented: {', '.join(_GATES)}.")
    if "qk-post-norm" in str(getattr(config, "auto_map", "")):
        raise UnsupportedModelError(
            "The config's auto_map names the variant with norms of queries and keys (the model for code), whose "
            "blocks have norms that are not implemented. The models for texts are served."
        )
    check_settings(config, positions="alibi")
    heads, head_dim = config.num_attention_heads, even_head_dim(config.hidden_size, config.num_attention_heads)
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    block = Block(
        placement=Post(layer_norm, layer_norm),
        attention=Attention(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=TwoSidedSlopes(slopes(heads)),
            causal=False,
            qkv_bias=True,
            out_bias=True,
        ),
        # The gates' matrix has no bias, the other one has.
        ffn=Gated(config.intermediate_size, _GATES[kind], bias=True),
    )
    encoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(
            vocab_size=config.vocab_size,
            width=config.hidden_size,
            token_types=config.type_vocab_size,
            norm=layer_norm,
        ),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=None,
    )
    return ModelSpec(encoder=encoder, decoder=None, head=bert.head_of(config))


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    entries = embedding_weights(model, "bert")
    for i, block in enumerate(model.encoder.blocks):
        target, source, names = f"encoder.blocks.{i}", f"bert.encoder.layer.{i}", BERT_LAYER
        projections = (f"{source}.{names.queries}", f"{source}.{names.keys}", f"{source}.{names.values}")
        entries += [
            *qkv(f"{target}.attention.inner.qkv", projections, block.attention),
            *linear(f"{target}.attention.inner.out", f"{source}.{names.out}", True, 1),
            *norm(f"{target}.attention.outer", f"{source}.{names.attention_norm}", bias=True),
            # What is activated comes first, as in our own matrix.
            Entry(f"{target}.ffn.inner.gate_up.weight", (f"{source}.mlp.gated_layers.weight",), shard_axis=0),
            Entry(f"{target}.ffn.inner.gate_up.bias", (f"{source}.mlp.gated_layers.bias",), shard_axis=0, default=0.0),
            *linear(f"{target}.ffn.inner.down", f"{source}.mlp.wo", True, 1),
            *norm(f"{target}.ffn.outer", f"{source}.mlp.layernorm", bias=True),
        ]
    more, ignored = bert.head_weights(model, "bert")
    return WeightTable(
        tuple(entries + more),
        prefix="bert.",
        ignored=(*ignored, r"bert\.embeddings\.(position|token_type)_ids"),
        head=bert.masked_table(model),
    )


FAMILY = Family(
    name="Jina v2",
    architectures=tuple(f"JinaBert{kind}" for kind in bert.KINDS if kind != "ForPreTraining"),
    brings="BERT's encoder with symmetric ALiBi and gated feed-forward networks",
    spec=spec,
    weights=weights,
)
