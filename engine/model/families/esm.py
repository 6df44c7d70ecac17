"""ESM: a pre-norm encoder of proteins with learned or rotary positions, which scales inputs by their masks
(bioRxiv:2022.07.20.500902)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import tokens
from engine.model.families.encoder import (
    BERT_LAYER,
    KINDS,
    EncoderNames,
    encoder,
    encoder_table,
    of,
    roberta_heads,
)
from engine.model.families.encoder_only import (
    check_settings,
    positions_after_padding,
    post_norm_encoder,
    pre_norm,
    roberta_head,
    turned,
)
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Dense, MaskedOut, ModelSpec, Stack
from engine.model.table import WeightTable

# The share of masks in training: 15% of the tokens were chosen, of which 80% became masks.
_USUAL = 0.15 * 0.8


def _stack(config: Any) -> Stack:
    kind = config.position_embedding_type
    if kind not in ("absolute", "rotary"):
        raise UnsupportedModelError(
            f"position_embedding_type of the config is {kind!r}; implemented for this family: absolute, rotary."
        )
    if config.is_folding_model:
        raise UnsupportedModelError("The config sets is_folding_model: structures of proteins are not predicted here.")
    check_settings(config, positions=kind)
    layer_norm = Norm("layer", config.layer_norm_eps, bias=True)
    learned: Learned | None = None
    if kind == "absolute":
        learned = positions_after_padding(config, config.pad_token_id)
    embedding = tokens(
        config,
        masked_out=MaskedOut(_mask(config), _USUAL) if config.token_dropout else None,
        positions=learned,
        norm=layer_norm if config.emb_layer_norm_before else None,
    )
    ffn = Dense(config.intermediate_size, "gelu", bias=True)
    encoder = post_norm_encoder(config, embedding, layer_norm, ffn=ffn)
    if kind == "rotary":
        encoder = turned(encoder, config.rope_theta, in_float32=True)
    return pre_norm(encoder, layer_norm)


def _mask(config: Any) -> int:
    mask = config.mask_token_id
    if not isinstance(mask, int) or not 0 <= mask < config.vocab_size:
        raise UnsupportedModelError(
            f"The config sets token_dropout, so mask_token_id must be an id from 0 to {config.vocab_size - 1}; got "
            f"{mask!r}."
        )
    return mask


NAMES = EncoderNames(
    stem="esm",
    embedding_norm="embeddings.layer_norm",
    layer=replace(BERT_LAYER, norms=("attention.LayerNorm", "LayerNorm")),
    final_norm="encoder.emb_layer_norm_after",
    heads=roberta_heads("esm"),
    unread=(
        # Frequencies, and a head that predicts contacts, which older checkpoints of all kinds store.
        r"(encoder\.layer\.[\d*]+\.attention\.self\.)?rotary_embeddings\.inv_freq",
        r"(contact_head\..*|embeddings\.position_embeddings\.weight)",
    ),
)


def _weights(model: ModelSpec) -> WeightTable:
    table = encoder_table(model, NAMES)
    # The bias is stored beside the matrix of a masked-language-model head, which has none.
    return replace(table, entries=tuple(e for e in table.entries if e.sources != ("lm_head.decoder.bias",)))


FAMILY = encoder(
    "ESM",
    of(KINDS, "Esm"),
    "encoder for proteins, norms before sublayers, embeddings scaled by the share of masks",
    stack=_stack,
    head=roberta_head,
    weights=_weights,
)
