"""Jamba, RecurrentGemma, MiniMax and Kimi Linear: some layers have attention, the others a recurrence."""

from __future__ import annotations

from typing import Any

import torch

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    attention,
    corrected,
    gated_network,
    layer_kinds,
    linear,
    lm,
    norm,
    rms,
    rotary,
    routed,
    sliding_window,
    tokens,
)
from engine.model.families.decoder import Factors, decoder, pairs
from engine.model.families.deepseek import latent_attention, latent_weights
from engine.model.families.expert_decoders import MIXTRAL
from engine.model.families.names import DecoderNames, ExpertNames
from engine.model.families.newer_expert_decoders import by_layer
from engine.model.normalisation import Norm
from engine.model.spec import (
    NO_ATTENTION,
    Attention,
    ChannelScan,
    FadingAttention,
    FeatureDelta,
    FeedForward,
    Gated,
    GatedRecurrence,
    NormedResidual,
    Placement,
    Shared,
    StateLayer,
)
from engine.model.table import Entry, HeadRows, Joined, Reshaped, Turned

_STATE = "linear_attention"


def _carries(c: Any, *others: str) -> list[bool]:
    """Whether each layer carries a state. Raises UnsupportedModelError if a layer has another type."""
    return [
        kind == _STATE for kind in layer_kinds(c, _STATE, *(others or ("full_attention",)), family=" for this family")
    ]


def _attended(carries: list[bool], own: Attention) -> list[Attention]:
    return [NO_ATTENTION if carried else own for carried in carries]


def _mixed(carries: list[bool], part: StateLayer) -> list[StateLayer | None]:
    return [part if carried else None for carried in carries]


def _kernel(name: str, size: int) -> int:
    if not 2 <= size <= 64:
        raise UnsupportedModelError(f"{name} of the config must be from 2 to 64, got {size}.")
    return size


def _convolution(target: str, source: str, width: int, kernel: int, bias: bool) -> list[Entry]:
    entries = [Entry(f"{target}.weight", (f"{source}.weight",), Reshaped(((width, 1, kernel),)))]
    return entries + [Entry(f"{target}.bias", (f"{source}.bias",))] * bias


def _entries(target: str, source: str, **names: str) -> list[Entry]:
    """Entries of parameters that are stored in our layout."""
    return [Entry(f"{target}.{ours}", (f"{source}.{theirs}",)) for ours, theirs in names.items()]


# ---------------------------------------------------------------- Jamba (arXiv:2403.19887)


def _jamba_scan(c: Any) -> list[StateLayer | None]:
    part = ChannelScan(
        width=c.mamba_expand * c.hidden_size,
        size=c.mamba_d_state,
        rank=c.mamba_dt_rank,
        kernel=_kernel("mamba_d_conv", c.mamba_d_conv),
        norm=rms(c),
        bias=c.mamba_proj_bias,
        kernel_bias=c.mamba_conv_bias,
    )
    return _mixed(_carries(c), part)


def _jamba_networks(c: Any) -> list[FeedForward]:
    if c.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act of the config must be 'silu' for Jamba, got {c.hidden_act!r}.")
    network = gated_network(c)
    return [
        routed(network, count=count, active=c.num_experts_per_tok, normalize=False) if count > 1 else network
        for count in c.layers_num_experts
    ]


def _scan_weights(target: str, layer: str, part: StateLayer) -> list[Entry]:
    assert isinstance(part, ChannelScan)
    source = f"{layer}.mamba"
    norms = {"step_norm": "dt_layernorm", "before_norm": "b_layernorm", "after_norm": "c_layernorm"}
    return [
        *linear(f"{target}.enter", f"{source}.in_proj", part.bias),
        *_convolution(f"{target}.convolution", f"{source}.conv1d", part.width, part.kernel, part.kernel_bias),
        *linear(f"{target}.made", f"{source}.x_proj", False),
        *linear(f"{target}.steps", f"{source}.dt_proj", True),
        *_entries(target, source, decay="A_log", skip="D"),
        *(e for ours, theirs in norms.items() for e in norm(f"{target}.{ours}", f"{source}.{theirs}", bias=False)),
        *linear(f"{target}.out", f"{source}.out_proj", part.bias),
    ]


# ---------------------------------------------------------------- RecurrentGemma (arXiv:2404.07839)


def _griffin_layers(c: Any) -> list[bool]:
    return _carries(c, "sliding_attention")


def _griffin_attention(c: Any) -> list[Attention]:
    own = attention(
        c,
        position=rotary(c, partial=True),
        sees=sliding_window(c.attention_window_size),
        qkv_bias=c.attention_bias,
        out_bias=True,
    )
    return _attended(_griffin_layers(c), own)


def _griffin_recurrence(c: Any) -> list[StateLayer | None]:
    if c.lru_width != c.hidden_size or c.lru_width % c.num_attention_heads:
        raise UnsupportedModelError(
            f"lru_width of the config must be hidden_size {c.hidden_size} and a multiple of num_attention_heads "
            f"{c.num_attention_heads}, got {c.lru_width}."
        )
    part = GatedRecurrence(
        width=c.lru_width,
        blocks=c.num_attention_heads,
        kernel=_kernel("conv1d_width", c.conv1d_width),
        activation=activation(c.hidden_activation),
    )
    return _mixed(_griffin_layers(c), part)


def _recurrence_weights(target: str, layer: str, part: StateLayer) -> list[Entry]:
    assert isinstance(part, GatedRecurrence)
    source = f"{layer}.temporal_block"
    unit, entered = f"{source}.rg_lru", (f"{source}.linear_y", f"{source}.linear_x")
    gates = {"inputs": "input_gate", "decays": "recurrent_gate"}
    return [
        *(
            Entry(f"{target}.enter.{kind}", tuple(f"{name}.{kind}" for name in entered), Joined((part.width,) * 2))
            for kind in ("weight", "bias")
        ),
        *_convolution(f"{target}.convolution", f"{source}.conv_1d", part.width, part.kernel, True),
        *(Entry(f"{target}.{o}.weight", (f"{unit}.{t}_weight",), Turned()) for o, t in gates.items()),
        *(Entry(f"{target}.{o}.bias", (f"{unit}.{t}_bias",)) for o, t in gates.items()),
        *_entries(target, unit, speed="recurrent_param"),
        *linear(f"{target}.out", f"{source}.linear_out", True),
    ]


# ---------------------------------------------------------------- MiniMax (arXiv:2501.08313)


def _minimax_fading(c: Any) -> list[StateLayer | None]:
    heads, layers = c.num_attention_heads, c.num_hidden_layers
    rates = [2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)]
    found: list[StateLayer | None] = []
    for layer, carried in enumerate(_carries(c)):
        deeper = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        part = FadingAttention(
            heads=heads,
            head_dim=getattr(c, "head_dim", None) or c.hidden_size // heads,
            slopes=tuple(rate * deeper for rate in rates),
            activation=activation(c.hidden_act),
            norm=Norm("rms", 1e-6),  # the eps of the other norms does not apply
        )
        found.append(part if carried else None)
    return found


def _minimax_shares(c: Any) -> list[tuple[float, float]]:
    """The factors of each layer's stream and of its attention's result."""
    kinds = ("linear" if carried else "full" for carried in _carries(c))
    return [tuple(float(getattr(c, f"{kind}_attn_{x}_factor")) for x in ("alpha", "beta")) for kind in kinds]  # type: ignore[misc]


def _minimax_placement(c: Any, own: Norm) -> list[Placement]:
    """The placement of each layer's norms. The stream is not multiplied by its factors; instead the eps of the norm
    after each factor is divided by the factor's square."""
    first, found = 1.0, list[Placement]()
    for stream, _ in _minimax_shares(c):
        found.append(NormedResidual(Norm("rms", own.eps / first**2), Norm("rms", own.eps / stream**2)))
        first = c.mlp_alpha_factor
    return found


def _minimax_factors(c: Any) -> list[Factors]:
    network = c.mlp_beta_factor / c.mlp_alpha_factor
    return [
        (("attention.inner.out.weight", (added / stream,), ()), ("ffn.inner.down.weight", (network,), ()))
        for stream, added in _minimax_shares(c)
    ]


def _refuse_minimax(c: Any) -> None:
    factors = [*(stream for stream, _ in _minimax_shares(c)), c.mlp_alpha_factor]
    if min(factors) <= 0:
        raise UnsupportedModelError(
            "full_attn_alpha_factor, linear_attn_alpha_factor and mlp_alpha_factor of the config must be above 0, got "
            f"{c.full_attn_alpha_factor}, {c.linear_attn_alpha_factor} and {c.mlp_alpha_factor}."
        )


def _fading_weights(target: str, layer: str, part: StateLayer) -> list[Entry]:
    assert isinstance(part, FadingAttention)
    source, width = f"{layer}.self_attn", part.heads * part.head_dim
    rows = tuple(HeadRows(part.heads, 3 * part.head_dim, i * part.head_dim) for i in (2, 1, 0))
    return [
        Entry(f"{target}.enter.weight", (f"{source}.qkv_proj.weight",) * 3, Joined((width,) * 3, rows)),
        *linear(f"{target}.opening", f"{source}.output_gate", False),
        *norm(f"{target}.norm", f"{source}.norm", bias=False),
        *linear(f"{target}.out", f"{source}.out_proj", False),
    ]


# ---------------------------------------------------------------- Kimi Linear (arXiv:2510.26692)


def _kimi_delta(c: Any) -> list[StateLayer | None]:
    if c.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act of the config must be 'silu' for Kimi Linear, got {c.hidden_act!r}.")
    part = FeatureDelta(
        heads=c.linear_num_heads,
        head_dim=c.linear_head_dim,
        kernel=_kernel("linear_conv_kernel_dim", c.linear_conv_kernel_dim),
        eps=c.rms_norm_eps,
    )
    return _mixed(_carries(c), part)


def _kimi_networks(c: Any) -> list[FeedForward]:
    (count, shared), act = (c.num_local_experts, c.n_shared_experts), activation(c.hidden_act)
    chosen = routed(
        Gated(c.moe_intermediate_size, act),
        count=count,
        active=c.num_experts_per_tok,
        normalize=c.norm_topk_prob,
        routing=corrected(c, count),
    )
    return by_layer(c, gated_network(c), Shared(chosen, Gated(c.moe_intermediate_size * shared, act)))


def _delta_weights(target: str, layer: str, part: StateLayer) -> list[Entry]:
    assert isinstance(part, FeatureDelta)
    source, size = f"{layer}.self_attn", part.head_dim
    lows = tuple(f"{source}.{name}_a_proj.weight" for name in ("forget_gate.f", "g"))
    apart = tuple(f"{source}.{name}_conv1d.weight" for name in "qkv")
    return [
        Entry(
            f"{target}.enter.weight",
            tuple(f"{source}.{name}_proj.weight" for name in "qkv"),
            Joined((part.width,) * 3),
        ),
        *_convolution(f"{target}.convolution", f"{source}.conv1d", 3 * part.width, part.kernel, False),
        Entry(f"{target}.convolution.weight", apart, Reshaped(((part.width, 1, part.kernel),) * 3)),
        *linear(f"{target}.rates", f"{source}.b_proj", False),
        Entry(f"{target}.low.weight", lows, Joined((size, size))),
        *linear(f"{target}.fading", f"{source}.forget_gate.f_b_proj", False),
        *linear(f"{target}.opening", f"{source}.g_b_proj", False),
        Entry(f"{target}.decay", (f"{source}.forget_gate.A_log",), Reshaped(((1, 1, part.heads, 1),))),
        *_entries(target, source, offset="forget_gate.dt_bias", norm="o_norm.weight"),
        *linear(f"{target}.out", f"{source}.o_proj", False),
    ]


FAMILIES = (
    decoder(
        "Jamba",
        pairs("Jamba"),
        "Mamba's selective scan with a state in most layers, attention without positions, MoE in some layers",
        attention=lambda c: _attended(_carries(c), attention(c)),
        mixing=_jamba_scan,
        ffn=_jamba_networks,
        names=DecoderNames(
            mixing=_scan_weights,
            norms=("input_layernorm", "pre_ff_layernorm"),
            final_norm="final_layernorm",
            ffn=tuple(f"feed_forward.{name}_proj" for name in ("gate", "up", "down")),
            experts=ExpertNames(
                router="feed_forward.router", each="feed_forward.experts", fused="feed_forward.experts"
            ),
        ),
    ),
    decoder(
        "RecurrentGemma",
        pairs("RecurrentGemma"),
        "gated linear recurrences (RG-LRU) with a state in most layers, attention with windows",
        attention=_griffin_attention,
        mixing=_griffin_recurrence,
        ffn=lambda c: Gated(c.intermediate_size // 2, activation(c.hidden_activation), bias=True),
        norm=lambda c: Norm("rms", c.rms_norm_eps, unit_offset=True),
        # The reference rounds the factor to bfloat16.
        embedding=lambda c: tokens(c, scale=float(torch.tensor(c.hidden_size**0.5, dtype=torch.bfloat16))),
        head=lambda c: lm(c, softcap=c.logits_soft_cap),
        names=DecoderNames(
            mixing=_recurrence_weights,
            norms=("temporal_pre_norm", "channel_pre_norm"),
            final_norm="final_norm",
            qkv=tuple(f"temporal_block.{name}_proj" for name in "qkv"),  # type: ignore[arg-type]
            out="temporal_block.o_proj",
            ffn=tuple(f"mlp_block.{name}_proj" for name in ("gate", "up", "down")),
        ),
    ),
    decoder(
        "MiniMax",
        pairs("MiniMax"),
        "lightning attention with a state in most layers, norms before the residuals, MoE",
        attention=lambda c: _attended(
            _carries(c), attention(c, position=rotary(c), sees=sliding_window(c.sliding_window))
        ),
        mixing=_minimax_fading,
        ffn=lambda c: routed(gated_network(c), count=c.num_local_experts, active=c.num_experts_per_tok),
        placement=_minimax_placement,
        final_norm=lambda c: Norm("rms", c.rms_norm_eps / c.mlp_alpha_factor**2),
        factors=_minimax_factors,
        refuse=_refuse_minimax,
        names=DecoderNames(
            mixing=_fading_weights,
            experts=MIXTRAL,
            # Constants that follow from the number of heads.
            unread=(*DecoderNames().unread, r"layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)"),
        ),
    ),
    decoder(
        "Kimi Linear",
        pairs("KimiLinear"),
        "delta rule with a decay per feature and a state in most layers, latent attention without positions, MoE",
        attention=lambda c: _attended(
            _carries(c), latent_attention(c, scale=(c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5)
        ),
        mixing=_kimi_delta,
        ffn=_kimi_networks,
        names=DecoderNames(
            attention=latent_weights,
            mixing=_delta_weights,
            experts=ExpertNames(matrices=MIXTRAL.matrices),
            # The names in files, and transformers' own names.
            renamed=(
                (r"\.block_sparse_moe\.", ".mlp."),
                (r"\.self_attn\.(f_[ab]_proj|dt_bias|A_log)", r".self_attn.forget_gate.\1"),
            ),
        ),
    ),
)
