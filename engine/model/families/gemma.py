"""Gemma and VaultGemma: norms whose weights are deviations from 1, a scaled embedding, gated GELU (arXiv:2403.08295);
in VaultGemma Gemma 2's windows and caps (arXiv:2510.15001)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, decoder_table, layer_windows, plain_decoder, rotary
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Gated, Lm, ModelSpec
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(
            "use_bidirectional_attention of the config must be false for Gemma, for which bidirectional attention is "
            f"not defined; got {config.use_bidirectional_attention}."
        )
    vault = config.model_type == "vaultgemma"
    head_dim = config.head_dim
    attentions = [
        Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=(config.query_pre_attn_scalar if vault else head_dim) ** -0.5,
            position=rotary(config, head_dim),
            window=window,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            softcap=config.attn_logit_softcapping if vault else None,
        )
        for window in (layer_windows(config) if vault else [None] * config.num_hidden_layers)
    ]
    softcap = config.final_logit_softcapping if vault else None
    return plain_decoder(
        config,
        attentions,
        Gated(config.intermediate_size, activation(config.hidden_activation if vault else config.hidden_act)),
        norm=Norm("rms", config.rms_norm_eps, unit_offset=True),
        scale=config.hidden_size**0.5,
        head=Lm(tied=config.tie_word_embeddings, softcap=softcap),
    )


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    table = decoder_table(model)
    # VaultGemma's name of the second norm.
    others = (
        Entry(f"decoder.blocks.{i}.ffn.before.weight", (f"model.layers.{i}.pre_feedforward_layernorm.weight",))
        for i in range(len(model.decoder.blocks))
    )
    return replace(table, entries=(*table.entries, *others))


FAMILY = Family(
    name="Gemma",
    architectures=("GemmaForCausalLM", "GemmaModel", "VaultGemmaForCausalLM", "VaultGemmaModel"),
    headless=("GemmaModel", "VaultGemmaModel"),
    brings="norms with weights around 0, scaled embeddings; VaultGemma: Gemma 2's windows and soft caps",
    spec=spec,
    weights=weights,
)
