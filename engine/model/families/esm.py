"""ESM: a pre-norm encoder of proteins, with learned or rotary positions, which scales inputs by their masks
(bioRxiv:2022.07.20.500902)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families import roberta
from engine.model.families.common import norm
from engine.model.families.encoder_only import (
    BERT_LAYER,
    OLD_NORMS,
    check_settings,
    positions_after_padding,
    post_norm_encoder,
    pre_norm,
    stack_weights,
    turned,
)
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Dense, MaskedLm, MaskedOut, ModelSpec, Tokens
from engine.model.table import Family, WeightTable

# The share of masks in training: 15% of the tokens were chosen, of which 80% became masks.
_USUAL = 0.15 * 0.8


def spec(config: Any) -> ModelSpec:
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
    encoder = post_norm_encoder(
        Tokens(
            vocab_size=config.vocab_size,
            width=config.hidden_size,
            masked_out=MaskedOut(_mask(config), _USUAL) if config.token_dropout else None,
            positions=learned,
            norm=layer_norm if config.emb_layer_norm_before else None,
        ),
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        ffn=Dense(config.intermediate_size, "gelu", bias=True),
        layer_norm=layer_norm,
    )
    if kind == "rotary":
        encoder = turned(encoder, config.rope_theta, in_float32=True)
    return ModelSpec(
        encoder=pre_norm(encoder, layer_norm),
        decoder=None,
        head=roberta.head_of(config),
        context_length=None if learned is None else learned.size - learned.offset,
    )


def _mask(config: Any) -> int:
    mask = config.mask_token_id
    if not isinstance(mask, int) or not 0 <= mask < config.vocab_size:
        raise UnsupportedModelError(
            f"The config sets token_dropout, so mask_token_id must be an id from 0 to {config.vocab_size - 1}; got "
            f"{mask!r}."
        )
    return mask


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    names = replace(BERT_LAYER, attention_norm="attention.LayerNorm", ffn_norm="LayerNorm")
    entries = [
        *stack_weights(model, "esm", names=names, embedding_norm="embeddings.layer_norm"),
        *norm("encoder.final_norm", "esm.encoder.emb_layer_norm_after", bias=True),
    ]
    more, ignored = roberta.head_weights(model, "esm")
    if isinstance(model.head, MaskedLm):
        # The bias stands beside the matrix, which has none.
        more = [e for e in more if e.sources != ("lm_head.decoder.bias",)]
    return WeightTable(
        tuple(entries + more),
        prefix="esm.",
        ignored=(
            *ignored,
            # Frequencies, and a head that predicts contacts, which older checkpoints of all kinds store.
            r"esm\.(encoder\.layer\.[\d*]+\.attention\.self\.)?rotary_embeddings\.inv_freq",
            r"esm\.(contact_head\..*|embeddings\.position_embeddings\.weight)",
        ),
        renamed=OLD_NORMS,
        head="lm_head.decoder.weight" if isinstance(model.head, MaskedLm) else None,
    )


FAMILY = Family(
    name="ESM",
    architectures=tuple(f"Esm{kind}" for kind in roberta.KINDS),
    brings="encoder for proteins, norms before sublayers, embeddings scaled by the share of masks",
    spec=spec,
    weights=weights,
)
