"""Granite 4, Bamba, Falcon-H1 and Nemotron-H: attention and the selective scan of Mamba-2 (arXiv:2405.21060)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    attention,
    corrected,
    dense,
    gated_network,
    layer_kinds,
    linear,
    lm,
    rms,
    rotary,
    routed,
    tokens,
)
from engine.model.families.decoder import Factors, decoder, pairs
from engine.model.families.expert_decoders import granite_shared, granite_weights
from engine.model.families.names import DecoderNames
from engine.model.normalisation import Norm
from engine.model.spec import (
    NO_ATTENTION,
    NO_NETWORK,
    Attention,
    Dense,
    Experts,
    FeedForward,
    Gated,
    Lm,
    Placement,
    Pre,
    SelectiveScan,
    Shared,
    StateLayer,
)
from engine.model.table import Entry, Reshaped, Same, Stacked

_ATTENDS, _SCANS = "full_attention", "linear_attention"


def _kinds(c: Any, *known: str) -> list[str]:
    return layer_kinds(c, *known, family=" for this family")


def _scan(c: Any, **parts: Any) -> SelectiveScan:
    """The part that carries a state, from `mamba_n_heads` and the others; `parts` are fields that differ."""
    bias = {"bias": c.mamba_proj_bias, "out_bias": c.mamba_proj_bias, "kernel_bias": c.mamba_conv_bias}
    sizes = {"heads": c.mamba_n_heads, "head_dim": c.mamba_d_head, "groups": c.mamba_n_groups}
    own = {"size": c.mamba_d_state, "kernel": c.mamba_d_conv, "eps": c.rms_norm_eps}
    return _checked(c, SelectiveScan(**(bias | sizes | own | parts)))


def _checked(c: Any, part: SelectiveScan) -> SelectiveScan:
    sizes = (part.heads, part.head_dim, part.groups, part.size)
    if any(not isinstance(size, int) or not 1 <= size <= 4096 for size in sizes) or part.heads % part.groups:
        raise UnsupportedModelError(
            "Layers with a state must have from 1 to 4096 heads, features of a head, groups and features of a state, "
            f"and heads that the groups share evenly; the config has {', '.join(map(str, sizes))}."
        )
    if not 2 <= part.kernel <= 64:
        raise UnsupportedModelError(f"The convolutions of the config must see from 2 to 64 tokens, got {part.kernel}.")
    limit = c.time_step_limit
    if limit is not None and tuple(limit) != (0.0, math.inf):
        # transformers applies another one to prompts, and not to the tokens after them.
        raise UnsupportedModelError(f"time_step_limit of the config must be from 0 to infinity, got {list(limit)}.")
    return part


def _refuse_activations(c: Any) -> None:
    if c.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act of the config must be 'silu' for this family, got {c.hidden_act!r}.")


def _mixed(c: Any, part: SelectiveScan) -> list[StateLayer | None]:
    return [None if kind == _ATTENDS else part for kind in _kinds(c, _ATTENDS, _SCANS)]


def _attended(c: Any, part: Attention) -> list[Attention]:
    return [part if kind == _ATTENDS else NO_ATTENTION for kind in _kinds(c, _ATTENDS, _SCANS)]


def _scan_weights(target: str, layer: str, part: StateLayer, name: str = "mamba") -> list[Entry]:
    assert isinstance(part, SelectiveScan)
    source, entries = f"{layer}.{name}", linear(f"{target}.enter", f"{layer}.{name}.in_proj", part.bias)
    kernels = Reshaped(((part.convolved, 1, part.kernel),))
    entries.append(Entry(f"{target}.convolution.weight", (f"{source}.conv1d.weight",), kernels))
    if part.kernel_bias:
        entries.append(Entry(f"{target}.convolution.bias", (f"{source}.conv1d.bias",)))
    names = {"decay": "A_log", "offset": "dt_bias", "skip": "D"}
    entries += [Entry(f"{target}.{ours}", (f"{source}.{theirs}",)) for ours, theirs in names.items()]
    if part.eps is not None:
        entries.append(Entry(f"{target}.norm", (f"{source}.norm.weight",)))
    return entries + linear(f"{target}.out", f"{source}.out_proj", part.out_bias)


# ---------------------------------------------------------------- Granite 4


def _granite_networks(c: Any) -> FeedForward:
    """The feed-forward network: one dense network, with or without experts beside it."""
    always = Gated(c.shared_intermediate_size, activation(c.hidden_act))
    if not c.num_local_experts:
        return always
    return Shared(routed(gated_network(c), count=c.num_local_experts, active=c.num_experts_per_tok), always)


def _granite_network_weights(target: str, source: str, part: FeedForward) -> list[Entry]:
    if isinstance(part, Shared):
        return granite_weights(target, source, part)
    return granite_shared(target, source, part)


def _refuse_granites(c: Any) -> None:
    _refuse_activations(c)
    if c.residual_multiplier <= 0 or not c.logits_scaling:
        raise UnsupportedModelError(
            "residual_multiplier of the config must be above 0, and logits_scaling not 0; got "
            f"{c.residual_multiplier} and {c.logits_scaling}."
        )


def _granite_attention(c: Any) -> list[Attention]:
    position = rotary(c) if c.position_embedding_type == "rope" else None
    return _attended(c, attention(c, scale=c.attention_multiplier, position=position, bias=c.attention_bias))


# ---------------------------------------------------------------- Falcon-H1


def _falcon_scan(c: Any) -> SelectiveScan:
    normed = {"eps": c.rms_norm_eps if c.mamba_rms_norm else None, "norm_first": c.mamba_norm_before_gate}
    return _scan(c, out_bias=c.projectors_bias, **normed)


def _falcon_factors(c: Any) -> Factors:
    """The constants of the config. Biases are added after some of them."""
    entered, read = c.attention_in_multiplier, c.ssm_in_multiplier
    gate, down = c.mlp_multipliers
    scan = _falcon_scan(c)
    shared = scan.groups * scan.size
    rows = (scan.width, scan.width, shared, shared, scan.heads)
    return (
        ("attention.qkv.weight", (entered, entered * c.key_multiplier, entered), ()),
        ("attention.qkv.bias", (1.0, c.key_multiplier, 1.0), ()),
        *((f"attention.out.{kind}", (c.attention_out_multiplier,), ()) for kind in ("weight", "bias")),
        ("state.enter.weight", tuple(factor * read for factor in c.ssm_multipliers), rows),
        ("state.enter.bias", tuple(c.ssm_multipliers), rows),
        *((f"state.out.{kind}", (c.ssm_out_multiplier,), ()) for kind in ("weight", "bias")),
        *((f"ffn.inner.gate_up.{kind}", (gate, 1.0), ()) for kind in ("weight", "bias")),
        *((f"ffn.inner.down.{kind}", (down,), ()) for kind in ("weight", "bias")),
    )


def _refuse_falcons(c: Any) -> None:
    _refuse_activations(c)
    if len(c.ssm_multipliers) != 5 or len(c.mlp_multipliers) != 2:
        raise UnsupportedModelError(
            "ssm_multipliers of the config must have 5 numbers and mlp_multipliers 2, "
            f"but they have {len(c.ssm_multipliers)} and {len(c.mlp_multipliers)}."
        )


# ---------------------------------------------------------------- Nemotron-H


def _nemotron_kinds(c: Any) -> list[str]:
    return _kinds(c, _ATTENDS, _SCANS, "mlp", "moe")


def _nemotron_norm(c: Any) -> Norm:
    return Norm("rms", c.layer_norm_epsilon)


def _nemotron_placement(c: Any, norm: Norm) -> list[Placement]:
    """A layer is one sublayer."""
    return [Pre(None, norm) if kind in ("mlp", "moe") else Pre(norm, None) for kind in _nemotron_kinds(c)]


def _nemotron_attention(c: Any) -> list[Attention]:
    own = attention(c)
    return [own if kind == _ATTENDS else NO_ATTENTION for kind in _nemotron_kinds(c)]


def _nemotron_mixing(c: Any) -> list[StateLayer | None]:
    own = SelectiveScan(
        heads=c.mamba_num_heads,
        head_dim=c.mamba_head_dim,
        groups=c.n_groups,
        size=c.ssm_state_size,
        kernel=c.conv_kernel,
        eps=c.layer_norm_epsilon,
        bias=c.use_bias,
        kernel_bias=c.use_conv_bias,
        out_bias=c.use_bias,
    )
    return [_checked(c, own) if kind == _SCANS else None for kind in _nemotron_kinds(c)]


def _nemotron_networks(c: Any) -> list[FeedForward]:
    act = activation(c.mlp_hidden_act)
    networks: dict[str, FeedForward] = {"mlp": Dense(c.intermediate_size, act, c.mlp_bias)}
    kinds = _nemotron_kinds(c)
    if "moe" in kinds:
        count, width = c.n_routed_experts, c.moe_intermediate_size
        chosen = routed(
            Dense(width, act),
            count=count,
            active=c.num_experts_per_tok,
            normalize=c.norm_topk_prob,
            routing=corrected(c, count),
        )
        networks["moe"] = Shared(chosen, Dense(c.moe_shared_expert_intermediate_size, act, c.mlp_bias))
    return [networks.get(kind, NO_NETWORK) for kind in kinds]


def _nemotron_network_weights(target: str, source: str, part: FeedForward) -> list[Entry]:
    names = ("up_proj", "down_proj")
    if not isinstance(part, Shared):
        assert isinstance(part, Dense)
        return dense(target, f"{source}.mixer", part, names)
    own, stored = f"{target}.routed", f"{source}.mixer.experts"
    assert isinstance(part.always, Dense)
    return [
        Entry(f"{own}.router.weight", (f"{source}.mixer.gate.weight",)),
        Entry(f"{own}.correction", (f"{source}.mixer.gate.e_score_correction_bias",)),
        *_expert_weights(own, stored, part.routed, names),
        *dense(f"{target}.always", f"{source}.mixer.shared_experts", part.always, names),
    ]


def _expert_weights(target: str, source: str, part: Experts, names: Sequence[str]) -> list[Entry]:
    """The matrices of all experts, one by one or in one tensor."""
    entries: list[Entry] = []
    for ours, theirs in zip(("up", "down"), names, strict=True):
        each = tuple(f"{source}.{number}.{theirs}.weight" for number in range(part.count))
        entries += [
            Entry(f"{target}.{ours}.weight", each, Stacked(Same(), part.count)),
            Entry(f"{target}.{ours}.weight", (f"{source}.{theirs}",)),
        ]
    return entries


def _refuse_nemotrons(c: Any) -> None:
    if c.mamba_hidden_act != "silu":
        raise UnsupportedModelError(
            f"mamba_hidden_act of the config must be 'silu' for this family, got {c.mamba_hidden_act!r}."
        )
    if "moe" in c.layer_types and c.moe_latent_size is not None:
        raise UnsupportedModelError(
            f"moe_latent_size of the config is {c.moe_latent_size}: experts that read fewer features are not "
            "implemented."
        )


_FED_FORWARD = DecoderNames(
    mixing=_scan_weights,
    norms=("input_layernorm", "pre_ff_layernorm"),
    final_norm="final_layernorm",
    ffn=tuple(f"feed_forward.{name}_proj" for name in ("gate", "up", "down")),
)

FAMILIES = (
    decoder(
        "Granite 4",
        pairs("GraniteMoeHybrid"),
        "Mamba-2's selective scan with a state in most layers, scaled embeddings, scores, residuals and logits; MoE",
        attention=_granite_attention,
        mixing=lambda c: _mixed(c, _scan(c)),
        ffn=_granite_networks,
        # The stream is divided by the factor of its residuals: norms do not see that, and no matrix is multiplied.
        norm=lambda c: Norm("rms", c.rms_norm_eps / c.residual_multiplier**2),
        embedding=lambda c: tokens(c, scale=c.embedding_multiplier / c.residual_multiplier),
        head=lambda c: lm(c, logit_scale=1 / c.logits_scaling),
        refuse=_refuse_granites,
        names=DecoderNames(mixing=_scan_weights, ffn=_granite_network_weights),
    ),
    decoder(
        "Bamba",
        pairs("Bamba"),
        "Mamba-2's selective scan with a state in most layers, attention that rotates half of each head",
        attention=lambda c: _attended(c, attention(c, position=rotary(c, partial=True), bias=c.attention_bias)),
        mixing=lambda c: _mixed(c, _scan(c)),
        ffn=lambda c: gated_network(c, bias=c.mlp_bias),
        norm=rms,
        refuse=_refuse_activations,
        names=_FED_FORWARD,
    ),
    decoder(
        "Falcon-H1",
        pairs("FalconH1"),
        "attention and Mamba-2's selective scan side by side in each layer, constant factors of all projections",
        attention=lambda c: [attention(c, position=rotary(c), bias=c.attention_bias)] * c.num_hidden_layers,
        mixing=lambda c: [_falcon_scan(c)] * c.num_hidden_layers,
        ffn=lambda c: gated_network(c, bias=c.mlp_bias),
        embedding=lambda c: tokens(c, scale=c.embedding_multiplier),
        head=lambda c: lm(c, logit_scale=c.lm_head_multiplier),
        factors=_falcon_factors,
        refuse=_refuse_falcons,
        names=_FED_FORWARD,
    ),
    decoder(
        "Nemotron-H",
        pairs("NemotronH"),
        "layers of one sublayer: Mamba-2's selective scan with a state, attention without positions, networks, experts",
        attention=_nemotron_attention,
        mixing=_nemotron_mixing,
        ffn=_nemotron_networks,
        norm=_nemotron_norm,
        placement=_nemotron_placement,
        head=lambda _: Lm(tied=False),
        refuse=_refuse_nemotrons,
        names=DecoderNames(
            stem="backbone",
            tokens="embeddings",
            final_norm="norm_f",
            norms=("norm", "norm"),
            qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            out="mixer.o_proj",
            qk_norm="",
            mixing=lambda target, layer, part: _scan_weights(target, layer, part, "mixer"),
            ffn=_nemotron_network_weights,
            unread=(*DecoderNames().unread, r"mtp\..*"),
            # As transformers names it.
            renamed=((r"^model\.", "backbone."),),
        ),
    ),
)
