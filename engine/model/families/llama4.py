"""Llama 4, as a text model: layers that see a chunk, and every few one without positions that sees all; experts that
read what was scaled for them, beside one for every token."""

from __future__ import annotations

from typing import Any

from engine.backends.attention.base import Chunks, Sight
from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    decoder_table,
    gated,
    plain_decoder,
    projected_attention,
    rotary,
    routed,
)
from engine.model.normalisation import Norm
from engine.model.positions import Temperature
from engine.model.rotary import attention_factor
from engine.model.spec import Attention, Block, FeedForward, Gated, ModelSpec, PerHead, ScaledInput, Shared
from engine.model.table import Entry, Family, Turned, WeightTable


def spec(config: Any) -> ModelSpec:
    layers, head_dim = config.num_hidden_layers, config.head_dim
    for name in ("no_rope_layers", "layer_types"):
        if len(getattr(config, name)) < layers:
            raise UnsupportedModelError(
                f"{name} of the config must have one entry for each of num_hidden_layers {layers}, but has "
                f"{len(getattr(config, name))}."
            )
    turned = rotary(config, head_dim, interleaved=True, in_float32=True)
    norm = None
    if config.use_qk_norm:
        if attention_factor(turned) != 1.0:
            raise UnsupportedModelError(
                "use_qk_norm of the config must be false where rope_parameters scale the rotated features (yarn, "
                "longrope): heads are normed before they are rotated."
            )
        norm = PerHead(Norm("rms", config.rms_norm_eps, weight=False))
    tuned = Temperature(config.attn_scale, config.floor_scale) if config.attn_temperature_tuning else None
    attentions = [
        Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=turned if rotates else None,
            temperature=None if rotates else tuned,
            window=_sight(config, kind),
            # After rotation in the reference, which changes no square.
            qk_norm=norm if rotates else None,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
        )
        for rotates, kind in zip(config.no_rope_layers, config.layer_types[:layers], strict=False)
    ]
    return plain_decoder(config, attentions, _networks(config))


def _sight(config: Any, kind: str) -> Sight | None:
    if kind == "full_attention":
        return None
    if kind != "chunked_attention":
        raise UnsupportedModelError(
            f"layer_types of the config holds {kind!r}; implemented: full_attention, chunked_attention."
        )
    if config.attention_chunk_size is None:
        raise UnsupportedModelError(
            "layer_types of the config holds 'chunked_attention', but attention_chunk_size is null. Set its size."
        )
    return Chunks(config.attention_chunk_size)


def _networks(config: Any) -> list[FeedForward]:
    """A plain network for each layer, or experts, as `moe_layers` says."""
    act = activation(config.hidden_act)
    plain, expert = Gated(config.intermediate_size_mlp, act), Gated(config.intermediate_size, act)
    chosen = set(config.moe_layers)
    if not chosen:
        return [plain] * config.num_hidden_layers
    experts = routed(
        expert,
        count=config.num_local_experts,
        active=config.num_experts_per_tok,
        normalize=False,
        routing=ScaledInput(),
    )
    return [Shared(experts, expert) if layer in chosen else plain for layer in range(config.num_hidden_layers)]


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    inner, stored = f"{target}.ffn.inner", f"{source}.feed_forward"
    entries = projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention)
    match block.ffn:
        case Shared(_, Gated() as always):
            entries += gated(f"{inner}.always", f"{stored}.shared_expert", always)
            entries += [
                Entry(f"{inner}.routed.router.weight", (f"{stored}.router.weight",)),
                Entry(f"{inner}.routed.up.weight", (f"{stored}.experts.gate_up_proj",), Turned(), shard_axis=1),
                Entry(f"{inner}.routed.down.weight", (f"{stored}.experts.down_proj",), Turned(), shard_axis=2),
            ]
        case Gated():
            entries += gated(inner, stored, block.ffn)
    return entries


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="Llama 4",
    architectures=("Llama4ForCausalLM", "Llama4TextModel"),
    headless=("Llama4TextModel",),
    brings="chunked attention, layers without positions whose queries are scaled by position, MoE with scaled inputs",
    spec=spec,
    weights=weights,
)
