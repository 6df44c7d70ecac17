"""Llama 4 as a text model: layers that see a chunk, and every few layers one without positions that sees everything;
experts with scaled inputs, beside one for every token."""

from __future__ import annotations

from typing import Any

from engine.backends.attention.base import Chunks, Sight
from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, attention, gated, rotary, routed
from engine.model.families.decoder import decoder
from engine.model.families.names import DecoderNames
from engine.model.normalisation import Norm
from engine.model.positions import Temperature
from engine.model.rotary import attention_factor
from engine.model.spec import Attention, FeedForward, Gated, PerHead, ScaledInput, Shared
from engine.model.table import Entry, Turned


def _attentions(config: Any) -> list[Attention]:
    layers = config.num_hidden_layers
    for name in ("no_rope_layers", "layer_types"):
        if len(getattr(config, name)) < layers:
            raise UnsupportedModelError(
                f"{name} of the config must have one entry for each of num_hidden_layers {layers}, but has "
                f"{len(getattr(config, name))}."
            )
    turned = rotary(config, interleaved=True, in_float32=True)
    norm = None
    if config.use_qk_norm:
        if attention_factor(turned) != 1.0:
            raise UnsupportedModelError(
                "use_qk_norm of the config must be false where rope_parameters scale the rotated features (yarn, "
                "longrope): heads are normed before they are rotated."
            )
        norm = PerHead(Norm("rms", config.rms_norm_eps, weight=False))
    tuned = Temperature(config.attn_scale, config.floor_scale) if config.attn_temperature_tuning else None
    return [
        attention(
            config,
            position=turned if rotates else None,
            temperature=None if rotates else tuned,
            sees=_sight(config, kind),
            # After rotation in the reference, which does not change squares.
            qk_norm=norm if rotates else None,
            bias=config.attention_bias,
        )
        for rotates, kind in zip(config.no_rope_layers, config.layer_types[:layers], strict=False)
    ]


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
    """A plain network for each layer, or experts, according to `moe_layers`."""
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


def _network_weights(target: str, source: str, part: FeedForward) -> list[Entry]:
    stored = f"{source}.feed_forward"
    match part:
        case Shared(_, Gated() as always):
            return [
                *gated(f"{target}.always", f"{stored}.shared_expert", always),
                Entry(f"{target}.routed.router.weight", (f"{stored}.router.weight",)),
                Entry(f"{target}.routed.up.weight", (f"{stored}.experts.gate_up_proj",), Turned()),
                Entry(f"{target}.routed.down.weight", (f"{stored}.experts.down_proj",), Turned()),
            ]
        case Gated():
            return gated(target, stored, part)
    raise AssertionError(f"Llama 4 has no {type(part).__name__}")


FAMILY = decoder(
    "Llama 4",
    ("Llama4ForCausalLM", "Llama4TextModel"),
    "chunked attention, layers without positions whose queries are scaled by position, MoE with scaled inputs",
    attention=_attentions,
    ffn=_networks,
    names=DecoderNames(ffn=_network_weights),
)
