"""Phi-3.5-MoE: two experts a token, chosen one after the other; layer norms; positions stretched for long contexts
(arXiv:2404.14219)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    decoder_table,
    experts,
    fused_experts,
    plain_decoder,
    projected_attention,
    rotary,
    routed,
    sliding_window,
)
from engine.model.normalisation import Norm
from engine.model.positions import LongScaling, Rotary, YarnScaling
from engine.model.spec import Attention, Block, Experts, Gated, Lm, ModelSpec, SparseMixer
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    if config.num_experts_per_tok != 2:
        raise UnsupportedModelError(
            f"num_experts_per_tok of the config must be 2 for Phi-3.5-MoE, got {config.num_experts_per_tok}."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=_position(config, head_dim),
        window=sliding_window(config.sliding_window),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    ffn = routed(
        Gated(config.intermediate_size, activation(config.hidden_act)),
        count=config.num_local_experts,
        active=2,
        normalize=False,
        routing=SparseMixer(2 * config.router_jitter_noise),
    )
    return plain_decoder(
        config,
        [attention] * config.num_hidden_layers,
        ffn,
        norm=Norm("layer", config.rms_norm_eps, bias=True),
        head=Lm(tied=config.tie_word_embeddings, bias=config.lm_head_bias),
    )


def _position(config: Any, head_dim: int) -> Rotary:
    """The position with the family's own factor of rotated features, if they are stretched."""
    part = rotary(config, head_dim)
    if part.scaling is None:
        return part
    settings = config.rope_parameters
    short, long = settings.get("short_mscale"), settings.get("long_mscale")
    if not isinstance(short, int | float) or short != long or not isinstance(part.scaling, LongScaling | YarnScaling):
        raise UnsupportedModelError(
            "rope_parameters of a Phi-3.5-MoE config must be of rope_type longrope or yarn, with short_mscale and "
            f"long_mscale the same number; got {settings.get('rope_type')!r}, {short!r} and {long!r}."
        )
    return replace(part, scaling=replace(part.scaling, attention_factor=float(short)))


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    assert isinstance(block.ffn, Experts)
    inner, stored, fused = f"{target}.ffn.inner", f"{source}.block_sparse_moe", f"{source}.mlp"
    return [
        *projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention),
        *experts(inner, f"{stored}.experts", block.ffn, ("w1", "w3", "w2"), f"{stored}.gate"),
        *fused_experts(inner, f"{fused}.experts", f"{fused}.router"),
    ]


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="Phi-3.5-MoE",
    architectures=("PhimoeForCausalLM", "PhimoeModel", "PhiMoEForCausalLM"),
    headless=("PhimoeModel",),
    brings="MoE with SparseMixer routing, layer norms",
    spec=spec,
    weights=weights,
)
