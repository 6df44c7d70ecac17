"""Hunyuan, dense and with experts: queries and keys normalised after rotation, a fixed stretch of the rotary base
(arXiv:2411.02265)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    decoder_table,
    experts,
    fused_experts,
    gated,
    norm,
    plain_decoder,
    projected_attention,
    rotary,
    routed,
)
from engine.model.normalisation import Norm
from engine.model.positions import Rotary
from engine.model.spec import AfterRotation, Attention, Block, Gated, ModelSpec, Shared
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=_rotary(config, head_dim),
        qk_norm=AfterRotation(Norm("rms", config.rms_norm_eps)),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    layers = config.num_hidden_layers
    network = Gated(config.intermediate_size, activation(config.hidden_act))
    model = plain_decoder(config, [attention] * layers, network)
    if config.model_type != "hunyuan_v1_moe":
        return model
    assert model.decoder is not None
    active = config.moe_topk if isinstance(config.moe_topk, list) else [config.moe_topk] * layers
    if len(active) != layers:
        raise UnsupportedModelError(
            f"moe_topk of the config must have one entry for each of num_hidden_layers {layers}, but has {len(active)}."
        )
    blocks = tuple(
        replace(block, ffn=Shared(routed(network, count=config.num_experts, active=own), network))
        for block, own in zip(model.decoder.blocks, active, strict=True)
    )
    return replace(model, decoder=replace(model.decoder, blocks=blocks))


def _rotary(config: Any, head_dim: int) -> Rotary:
    """The config's positions. What is named dynamic here has a fixed `alpha`, which only changes the base."""
    settings = config.rope_parameters
    alpha = settings.get("alpha") if settings.get("rope_type") == "dynamic" else None
    if not alpha:
        return rotary(config, head_dim)
    return Rotary(head_dim, settings["rope_theta"] * alpha ** (head_dim / (head_dim - 2)))


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    inner, attention, mlp = f"{target}.attention.inner", f"{source}.self_attn", f"{source}.mlp"
    entries = [
        *projected_attention(inner, attention, replace(block.attention, qk_norm=None)),
        *norm(f"{inner}.qk_norm.queries", f"{attention}.query_layernorm", bias=False),
        *norm(f"{inner}.qk_norm.keys", f"{attention}.key_layernorm", bias=False),
    ]
    match block.ffn:
        case Shared(part, Gated() as always):
            routed_to, names = f"{target}.ffn.inner.routed", ("gate_proj", "up_proj", "down_proj")
            entries += experts(routed_to, f"{mlp}.experts", part, names, f"{mlp}.gate.wg")
            entries += fused_experts(routed_to, f"{mlp}.experts", f"{mlp}.gate.wg")
            entries += gated(f"{target}.ffn.inner.always", f"{mlp}.shared_mlp", always)
        case Gated():
            entries += gated(f"{target}.ffn.inner", mlp, block.ffn)
    return entries


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="Hunyuan",
    architectures=(
        "HunYuanDenseV1ForCausalLM",
        "HunYuanDenseV1Model",
        "HunYuanMoEV1ForCausalLM",
        "HunYuanMoEV1Model",
    ),
    headless=("HunYuanDenseV1Model", "HunYuanMoEV1Model"),
    brings="QK norms after rotation; MoE with a shared expert",
    spec=spec,
    weights=weights,
)
