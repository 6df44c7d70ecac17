"""LFM2, LFM2-MoE and LFM3: layers of attention among layers of gated short convolutions (arXiv:2511.23404)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import attention, layer_kinds, layer_window, linear, rotary, routed
from engine.model.families.decoder import decoder, pairs
from engine.model.families.names import DecoderNames, ExpertNames
from engine.model.normalisation import Norm
from engine.model.spec import (
    NO_ATTENTION,
    Attention,
    Corrected,
    FeedForward,
    Gated,
    OutputGate,
    PerHead,
    Placement,
    Pre,
    Sandwich,
    ShortConvolution,
    StateLayer,
)
from engine.model.table import Entry, Reshaped


def _norm(c: Any) -> Norm:
    return Norm("rms", c.norm_eps)


def _attends(c: Any) -> list[bool]:
    """Whether each layer is attention; without types, all are."""
    if not c.layer_types:
        return [True] * c.num_hidden_layers
    return [kind == "full_attention" for kind in layer_kinds(c, "conv", "full_attention", family=" for LFM2")]


def _third_kinds(c: Any) -> list[str]:
    return layer_kinds(c, "conv", "full_attention", "sliding_attention", family=" for LFM3")


def _third_attention(c: Any) -> list[Attention]:
    """The attention of each layer. Each kind of layer has its own rotary settings."""
    gate = OutputGate(per_head=True) if c.use_attention_gate else None
    parts: dict[str, Any] = {"qk_norm": PerHead(_norm(c)), "gate": gate, "bias": c.attention_bias}
    return [
        NO_ATTENTION
        if kind == "conv"
        else attention(
            c,
            position=rotary(c, layer_type=kind, in_float32=True, shares=True),
            sees=layer_window(c, kind),
            **parts,
        )
        for kind in _third_kinds(c)
    ]


def _attention(c: Any) -> list[Attention]:
    own = attention(c, position=rotary(c), qk_norm=PerHead(_norm(c)))
    return [own if attends else NO_ATTENTION for attends in _attends(c)]


def _mixing(c: Any) -> list[StateLayer | None]:
    if c.conv_L_cache < 2:
        raise UnsupportedModelError(f"conv_L_cache of the config must be at least 2, got {c.conv_L_cache}.")
    own = ShortConvolution(width=c.hidden_size, kernel=c.conv_L_cache, bias=c.conv_bias)
    third = c.model_type == "lfm3"
    return [
        None if attends else own for attends in ([kind != "conv" for kind in _third_kinds(c)] if third else _attends(c))
    ]


def _network(c: Any) -> Gated:
    width = c.intermediate_size
    if c.block_auto_adjust_ff_dim:
        width = int(2 * width / 3)
        if c.block_ffn_dim_multiplier is not None:
            width = int(c.block_ffn_dim_multiplier * width)
            width = -(-width // c.block_multiple_of) * c.block_multiple_of
    return Gated(width, "silu")


def _networks(c: Any) -> list[FeedForward]:
    """The first layers have no experts."""
    first = min(c.num_dense_layers, c.num_hidden_layers)
    networks: list[FeedForward] = [Gated(c.intermediate_size, "silu")] * first
    if first == c.num_hidden_layers:
        return networks
    if not c.use_expert_bias:
        raise UnsupportedModelError("use_expert_bias of the config must be true, got false.")
    chosen = routed(
        Gated(c.moe_intermediate_size, "silu"),
        count=c.num_experts,
        active=c.num_experts_per_tok,
        normalize=c.norm_topk_prob,
        routing=Corrected(added=1e-6, scale=c.routed_scaling_factor),
    )
    return networks + [chosen] * (c.num_hidden_layers - first)


def _third_norms(placement: Placement) -> tuple[str, ...]:
    names = ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
    return names if isinstance(placement, Sandwich) else names[::2]


def _convolution_weights(target: str, layer: str, part: StateLayer) -> list[Entry]:
    assert isinstance(part, ShortConvolution)
    source = f"{layer}.conv"
    form = Reshaped(((part.width, 1, part.kernel),))
    entries = [
        *linear(f"{target}.enter", f"{source}.in_proj", part.bias),
        Entry(f"{target}.convolution.weight", (f"{source}.conv.weight",), form),
        *linear(f"{target}.out", f"{source}.out_proj", part.bias),
    ]
    return entries + [Entry(f"{target}.convolution.bias", (f"{source}.conv.bias",))] * part.bias


_NAMES = DecoderNames(
    out="self_attn.out_proj",
    qk_norm="self_attn.{}_layernorm",
    norms=("operator_norm", "ffn_norm"),
    final_norm="embedding_norm",
    ffn=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    experts=ExpertNames(
        router="feed_forward.gate",
        each="feed_forward.experts",
        matrices=("w1", "w3", "w2"),
        fused="feed_forward.experts",
        corrections=("feed_forward.expert_bias",),
    ),
    mixing=_convolution_weights,
)

FAMILIES = (
    decoder(
        "LFM2",
        pairs("Lfm2"),
        "gated short convolutions with a state in most layers, QK norms",
        attention=_attention,
        mixing=_mixing,
        ffn=_network,
        norm=_norm,
        names=_NAMES,
    ),
    decoder(
        "LFM3",
        pairs("Lfm3"),
        "gated short convolutions with a state in most layers, sandwich norms, gated heads, windows in some layers",
        attention=_third_attention,
        mixing=_mixing,
        ffn=lambda c: Gated(c.intermediate_size, "silu"),
        norm=_norm,
        placement=lambda c, norm: Sandwich(norm, norm, norm, norm) if c.use_sandwich_norm else Pre(norm, norm),
        names=replace(
            _NAMES,
            out="self_attn.o_proj",
            qk_norm="self_attn.{}_norm",
            norms=_third_norms,
            gate="self_attn.g_proj",
            renamed=((r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),),
        ),
    ),
    decoder(
        "LFM2-MoE",
        pairs("Lfm2Moe"),
        "gated short convolutions with a state in most layers, MoE with corrected scores",
        attention=_attention,
        mixing=_mixing,
        ffn=_networks,
        norm=_norm,
        names=_NAMES,
    ),
)
