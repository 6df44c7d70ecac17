"""FNet: BERT's encoder with Fourier transforms in the place of attention (arXiv:2105.03824)."""

from __future__ import annotations

from typing import Any

from engine.model.families import bert
from engine.model.families.common import activation, linear, norm
from engine.model.families.encoder_only import check_settings, embedding_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import NO_ATTENTION, Block, Dense, Fourier, ModelSpec, Post, Stack, Tokens
from engine.model.table import Family, WeightTable


def spec(config: Any) -> ModelSpec:
    # With use_tpu_fourier_optimizations the same transform is computed by other means.
    check_settings(config)
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    block = Block(
        placement=Post(layer_norm, layer_norm),
        attention=NO_ATTENTION,
        mixing=Fourier(),
        ffn=Dense(config.intermediate_size, activation(config.hidden_act), bias=True),
    )
    encoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(
            vocab_size=config.vocab_size,
            width=config.hidden_size,
            positions=Learned(config.max_position_embeddings),
            token_types=config.type_vocab_size,
            norm=layer_norm,
            expansion=config.hidden_size,
        ),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=None,
    )
    return ModelSpec(encoder=encoder, decoder=None, head=bert.head_of(config))


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    entries = embedding_weights(model, "fnet")
    entries += linear("encoder.embedding.expansion", "fnet.embeddings.projection", True, 0)
    for i in range(len(model.encoder.blocks)):
        target, source = f"encoder.blocks.{i}", f"fnet.encoder.layer.{i}"
        entries += [
            *norm(f"{target}.attention.outer", f"{source}.fourier.output.LayerNorm", bias=True),
            *linear(f"{target}.ffn.inner.up", f"{source}.intermediate.dense", True, 0),
            *linear(f"{target}.ffn.inner.down", f"{source}.output.dense", True, 1),
            *norm(f"{target}.ffn.outer", f"{source}.output.LayerNorm", bias=True),
        ]
    more, ignored = bert.head_weights(model, "fnet")
    return WeightTable(
        tuple(entries + more),
        prefix="fnet.",
        ignored=(
            *ignored,
            r"fnet\.embeddings\.((position|token_type)_ids|token_type_embeddings\.weight)",
            r"fnet\.encoder\.layer\.\d+\.fourier\.self\.dft_mat_(hidden|seq)",
        ),
        head=bert.masked_table(model),
    )


FAMILY = Family(
    name="FNet",
    architectures=tuple(f"FNet{kind}" for kind in bert.KINDS),
    brings="BERT's encoder with Fourier transforms instead of attention",
    spec=spec,
    weights=weights,
)
