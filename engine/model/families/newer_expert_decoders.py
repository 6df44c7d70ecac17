"""Decoders with experts from 2025 on. Most route by corrected sigmoid scores and have a network for every token."""

from __future__ import annotations

from typing import Any

from engine.backends.attention.base import Window
from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    attention,
    corrected,
    gated,
    gated_network,
    layer_window,
    layer_windows,
    lm,
    rms,
    rms_in_float32,
    rotary,
    routed,
    tokens,
)
from engine.model.families.decoder import decoder, pairs
from engine.model.families.decoders import exaone4
from engine.model.families.names import DecoderNames, ExpertNames
from engine.model.normalisation import Norm
from engine.model.spec import (
    Attention,
    Corrected,
    FeedForward,
    Gated,
    Likeliest,
    OutputGate,
    Parallel,
    PerHead,
    Routing,
    Sandwich,
    Shared,
    Sinks,
)
from engine.model.table import Entry, Turned


def by_layer(c: Any, dense: FeedForward, experts: FeedForward) -> list[FeedForward]:
    """The network of each layer, by `mlp_layer_types`, which transformers has checked."""
    return [experts if kind == "sparse" else dense for kind in c.mlp_layer_types]


def _shared(
    c: Any, width: int, routing: Routing, *, always: int | None = None, normalize: bool = True, bias: bool = False
) -> FeedForward:
    """Experts of `width` features beside a network of `always` features, if there is one, which may have biases."""
    act = activation(c.hidden_act)
    chosen = routed(
        Gated(width, act), count=c.num_experts, active=c.num_experts_per_tok, normalize=normalize, routing=routing
    )
    return Shared(chosen, Gated(always, act, bias)) if always else chosen


# ---------------------------------------------------------------- EXAONE MoE


def _exaone_networks(c: Any) -> list[FeedForward]:
    width = c.moe_intermediate_size
    experts = _shared(
        c,
        width,
        corrected(c, c.num_experts),
        always=width * c.num_shared_experts,
        normalize=c.norm_topk_prob,
    )
    return by_layer(c, gated_network(c), experts)


# ---------------------------------------------------------------- Hunyuan 3


def _hunyuan3(c: Any) -> list[FeedForward]:
    width = c.moe_intermediate_size
    routing = Corrected(least=1e-20, scale=c.router_scaling_factor)
    experts = _shared(c, width, routing, always=width * c.num_shared_experts, bias=c.mlp_bias)
    return by_layer(c, gated_network(c, bias=c.mlp_bias), experts)


# ---------------------------------------------------------------- AFMoE and Laguna


def _afmoe(c: Any) -> list[Attention]:
    """Only layers with a window have positions."""
    return [
        attention(
            c,
            position=rotary(c) if window else None,
            sees=window,
            qk_norm=PerHead(rms_in_float32(c)),
            gate=OutputGate(),
            bias=c.attention_bias,
        )
        for window in layer_windows(c)
    ]


def _afmoe_networks(c: Any) -> list[FeedForward]:
    width = c.moe_intermediate_size
    routing = Corrected(least=1e-20, scale=c.route_scale)
    experts = _shared(c, width, routing, always=width * c.num_shared_experts)
    return [gated_network(c) if i < c.num_dense_layers else experts for i in range(c.num_hidden_layers)]


def _laguna(c: Any) -> list[Attention]:
    """Each kind of layer has its rotary positions, and each layer its number of heads."""
    gate = OutputGate("softplus", per_head=c.gating is True or c.gating == "per-head")
    return [
        attention(
            c,
            heads=heads,
            position=rotary(c, layer_type=kind, partial=True),
            sees=window,
            qk_norm=PerHead(rms(c)),
            gate=gate,
            bias=c.attention_bias,
        )
        for heads, kind, window in zip(c.num_attention_heads_per_layer, c.layer_types, layer_windows(c), strict=True)
    ]


def _laguna_refusals(c: Any) -> None:
    if c.moe_router_logit_softcapping:
        raise UnsupportedModelError(
            f"moe_router_logit_softcapping of the config must be 0, got {c.moe_router_logit_softcapping}."
        )
    if c.gating not in (True, "per-head", "per-element"):
        raise UnsupportedModelError(f"gating of the config must be true, per-head or per-element, got {c.gating!r}.")


def _laguna_networks(c: Any) -> list[FeedForward]:
    routing = Corrected(scale=c.moe_routed_scaling_factor)
    experts = _shared(c, c.moe_intermediate_size, routing, always=c.shared_expert_intermediate_size)
    return by_layer(c, gated_network(c), experts)


# ---------------------------------------------------------------- Flint, Kolibri 1 and Aria


def _flint(c: Any) -> list[Attention]:
    """The attention of each layer. Only layers with a window have positions; all have sinks."""
    parts: dict[str, Any] = {"qk_norm": PerHead(rms_in_float32(c)), "sinks": Sinks(), "bias": c.attention_bias}
    return [attention(c, position=rotary(c) if window else None, sees=window, **parts) for window in layer_windows(c)]


def _flint_networks(c: Any) -> list[FeedForward]:
    every, width = c.decoder_sparse_step, c.shared_expert_intermediate_size
    chosen = [
        c.num_experts > 0 and i not in c.mlp_only_layers and not (i + 1) % every for i in range(c.num_hidden_layers)
    ]
    if not any(chosen):
        return [gated_network(c)] * len(chosen)
    experts = _shared(c, c.moe_intermediate_size, Corrected(), always=width, normalize=c.norm_topk_prob)
    return [experts if own else gated_network(c) for own in chosen]


def _kolibri_networks(c: Any) -> FeedForward:
    routing, width = Corrected(of_logits=True), c.shared_expert_intermediate_size
    return _shared(c, c.moe_intermediate_size, routing, always=width, normalize=c.norm_topk_prob)


def _aria_networks(c: Any) -> FeedForward:
    expert = Gated(c.intermediate_size, "silu")
    chosen = routed(expert, count=c.moe_num_experts, active=c.moe_topk)
    width = c.intermediate_size * c.moe_num_shared_experts
    return Shared(chosen, Gated(width, activation(c.hidden_act), bias=c.mlp_bias))


def _aria_weights(target: str, source: str, part: FeedForward) -> list[Entry]:
    assert isinstance(part, Shared)
    assert isinstance(part.always, Gated)
    stored, own = f"{source}.mlp.experts", f"{target}.routed"
    return [
        Entry(f"{own}.router.weight", (f"{source}.mlp.router.weight",)),
        *(
            Entry(f"{own}.{ours}.weight", (f"{stored}.{theirs}",), Turned())
            for ours, names in (("up", ("fc1.weight", "gate_up_proj")), ("down", ("fc2.weight", "down_proj")))
            for theirs in names
        ),
        *gated(f"{target}.always", f"{source}.mlp.shared_experts", part.always),
    ]


# ---------------------------------------------------------------- Command A with experts


def _command(c: Any) -> list[Attention]:
    """Layers without a window have no positions, unless they are the first ones without experts."""
    forced = c.prefix_dense_sliding_window_pattern == 1
    return [
        attention(
            c,
            position=rotary(c, interleaved=True, in_float32=True) if window or (forced and kind == "dense") else None,
            sees=window,
            bias=c.attention_bias,
        )
        for window, kind in zip(layer_windows(c), c.mlp_layer_types, strict=True)
    ]


def _command_networks(c: Any) -> list[FeedForward]:
    act = activation(c.hidden_act)
    experts = _shared(c, c.intermediate_size, Likeliest(), always=c.intermediate_size * c.num_shared_experts)
    dense = Gated(c.prefix_dense_intermediate_size or c.intermediate_size, act)
    return by_layer(c, dense, experts)


def _command_refusals(c: Any) -> None:
    if c.expert_selection_fn != "softmax":
        raise UnsupportedModelError(
            f"expert_selection_fn of the config must be 'softmax', got {c.expert_selection_fn!r}."
        )
    if c.num_shared_experts and c.shared_expert_combination_strategy != "sum":
        raise UnsupportedModelError(
            "shared_expert_combination_strategy of the config must be 'sum' where there are shared experts, got "
            f"{c.shared_expert_combination_strategy!r}."
        )


def _command_norm(c: Any) -> Norm:
    return Norm("layer", c.layer_norm_eps) if c.rms_norm_eps is None else rms(c)


def _mellum(c: Any) -> list[Attention]:
    windows: list[Window | None] = [layer_window(c, kind) for kind in c.layer_types]
    parts = {kind: rotary(c, layer_type=kind) for kind in set(c.layer_types)}
    return [
        attention(c, position=parts[kind], sees=window, qk_norm=PerHead(rms(c)), bias=c.attention_bias)
        for kind, window in zip(c.layer_types, windows, strict=True)
    ]


FAMILIES = (
    decoder(
        "EXAONE MoE",
        pairs("ExaoneMoe"),
        "EXAONE 4's attention with norms before sublayers, MoE routed by corrected sigmoid scores, in groups",
        attention=exaone4,
        ffn=_exaone_networks,
        names=DecoderNames(
            experts=ExpertNames(corrections=("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias")),
            unread=(*DecoderNames().unread, "mtp.*"),
        ),
    ),
    decoder(
        "Hunyuan 3",
        pairs("HYV3"),
        "QK norms per head, MoE routed by corrected sigmoid scores, with a shared expert",
        attention=lambda c: attention(c, position=rotary(c), qk_norm=PerHead(rms(c)), bias=c.attention_bias),
        ffn=_hunyuan3,
        names=DecoderNames(
            experts=ExpertNames(router="mlp.router.gate", always="mlp.shared_mlp", corrections=("mlp.expert_bias",)),
            guesses=True,
        ),
    ),
    decoder(
        "AFMoE",
        pairs("Afmoe"),
        "gated attention, sandwich norms, full-attention layers without positions, MoE with corrected sigmoid scores",
        attention=_afmoe,
        ffn=_afmoe_networks,
        norm=rms_in_float32,
        placement=lambda c, norm: Sandwich(norm, norm, norm, norm),
        embedding=lambda c: tokens(c, scale=c.hidden_size**0.5 if c.mup_enabled else 1.0),
        names=DecoderNames(
            norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
            experts=ExpertNames(router="mlp.router.gate", corrections=("mlp.expert_bias",)),
        ),
    ),
    decoder(
        "Laguna",
        pairs("Laguna"),
        "gated heads, a number of heads per layer, two rotary bases, MoE with corrected sigmoid scores",
        attention=_laguna,
        ffn=_laguna_networks,
        refuse=_laguna_refusals,
        names=DecoderNames(
            gate="self_attn.g_proj",
            experts=ExpertNames(
                always="mlp.shared_expert",
                corrections=("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
            ),
            renamed=((r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),),
        ),
    ),
    decoder(
        "Flint",
        pairs("Flint"),
        "sinks, QK norms per head, full-attention layers without positions, MoE routed by sigmoid scores",
        attention=_flint,
        ffn=_flint_networks,
        norm=rms_in_float32,
        names=DecoderNames(
            experts=ExpertNames(always="mlp.shared_expert", uncorrected=True),
            renamed=((r"\.softmax_offset$", ".sinks"),),
        ),
    ),
    decoder(
        "Kolibri 1",
        pairs("Kolibri1"),
        "EXAONE 4's attention with sandwich norms, MoE routed by corrected logits",
        attention=exaone4,
        ffn=_kolibri_networks,
        placement=lambda c, norm: Sandwich(norm, norm, norm, norm),
        names=DecoderNames(
            norms=(
                "input_layernorm",
                "post_self_attn_layernorm",
                "post_attention_layernorm",
                "post_mlp_layernorm",
            ),
            experts=ExpertNames(corrections=("mlp.gate.e_score_correction_bias", "moe.router.expert_bias")),
            renamed=(
                (r"\.post_attn_norm\.", ".post_self_attn_layernorm."),
                (r"\.post_ffn_norm\.", ".post_mlp_layernorm."),
            ),
        ),
    ),
    decoder(
        "Aria text",
        ("AriaTextForCausalLM", "AriaTextModel"),
        "LLaMA's attention, MoE with a shared expert",
        attention=lambda c: attention(c, position=rotary(c), bias=c.attention_bias),
        ffn=_aria_networks,
        names=DecoderNames(ffn=_aria_weights),
    ),
    decoder(
        "Mellum 2",
        pairs("Mellum"),
        "Qwen3-MoE's blocks with windows in some layers and a rotary base for each kind of layer",
        attention=_mellum,
        ffn=lambda c: by_layer(
            c, gated_network(c), _shared(c, c.moe_intermediate_size, Likeliest(), normalize=c.norm_topk_prob)
        ),
        names=DecoderNames(unread=(*DecoderNames().unread, r"mtp\..*")),
    ),
    decoder(
        "Command A with experts",
        pairs("Cohere2Moe"),
        "parallel blocks with experts, scaled logits; full-attention layers without positions",
        attention=_command,
        ffn=_command_networks,
        norm=_command_norm,
        placement=lambda c, norm: Parallel((norm,)),
        head=lambda c: lm(c, logit_scale=c.logit_scale),
        refuse=_command_refusals,
    ),
)
