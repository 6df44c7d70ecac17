"""FNet: BERT's encoder with Fourier transforms instead of attention (arXiv:2105.03824)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families.common import dense_network, same_layers, tokens
from engine.model.families.encoder import BERT_LAYER, PRETRAINED, TABLES, EncoderNames, encoder, of
from engine.model.families.encoder_only import bert_head, check_settings
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import NO_ATTENTION, Block, Fourier, Post, Stack


def _stack(config: Any) -> Stack:
    # use_tpu_fourier_optimizations computes the same transform by other means.
    check_settings(config)
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    block = Block(
        placement=Post(layer_norm, layer_norm),
        attention=NO_ATTENTION,
        mixing=Fourier(),
        ffn=dense_network(config),
    )
    embedding = tokens(
        config,
        positions=Learned(config.max_position_embeddings),
        token_types=config.type_vocab_size,
        norm=layer_norm,
        expansion=config.hidden_size,
    )
    return same_layers(config, embedding, block)


FAMILY = encoder(
    "FNet",
    of(PRETRAINED, "FNet"),
    "BERT's encoder with Fourier transforms instead of attention",
    stack=_stack,
    head=bert_head,
    names=EncoderNames(
        stem="fnet",
        expansion="embeddings.projection",
        layer=replace(
            BERT_LAYER,
            norms=("fourier.output.LayerNorm", "output.LayerNorm"),
            attention=lambda target, source, part: [],
        ),
        unread=(TABLES, r"encoder\.layer\.\d+\.fourier\.self\.dft_mat_(hidden|seq)"),
        renamed=(),
    ),
)
