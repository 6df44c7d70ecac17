"""Qwen3.5, dense and with experts, and Qwen3-Next: gated attention among layers of the gated delta rule
(arXiv:2412.06464)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, attention, gated_network, layer_kinds, linear, rotary, routed
from engine.model.families.decoder import decoder, pairs
from engine.model.families.names import DecoderNames, ExpertNames
from engine.model.normalisation import Norm
from engine.model.spec import (
    NO_ATTENTION,
    Attention,
    DeltaRule,
    FeedForward,
    Gated,
    Opened,
    OutputGate,
    PerHead,
    Shared,
    StateLayer,
)
from engine.model.table import Entry, HeadRows, Joined, Reshaped, Same

# The least and the most that they may be.
_SIZES = {
    "linear_num_key_heads": (1, 1024),
    "linear_num_value_heads": (1, 1024),
    "linear_key_head_dim": (1, 1024),
    "linear_value_head_dim": (1, 1024),
    "linear_conv_kernel_dim": (2, 64),
}


def _norm(c: Any) -> Norm:
    return Norm("rms", c.rms_norm_eps, unit_offset=True)


def _refuse_others(c: Any) -> None:
    if c.attention_bias:
        raise UnsupportedModelError("attention_bias of the config must be false for this family, got true.")
    if c.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act of the config must be 'silu' for this family, got {c.hidden_act!r}.")
    refuse_sizes(c)


def refuse_sizes(c: Any) -> None:
    """Refuse sizes of the gated delta rule that it cannot have. Raises UnsupportedModelError: names one."""
    for name, (least, most) in _SIZES.items():
        if not least <= getattr(c, name) <= most:
            raise UnsupportedModelError(f"{name} of the config must be from {least} to {most}, got {getattr(c, name)}.")
    if c.linear_num_value_heads % c.linear_num_key_heads:
        raise UnsupportedModelError(
            f"linear_num_value_heads {c.linear_num_value_heads} of the config must be a multiple of "
            f"linear_num_key_heads {c.linear_num_key_heads}."
        )


def attends(c: Any) -> list[bool]:
    """Whether each layer is attention. Raises UnsupportedModelError if a layer has another type, or there are too few
    or too many."""
    kinds = layer_kinds(c, "linear_attention", "full_attention", family=" for this family")
    return [kind == "full_attention" for kind in kinds]


def _attention(c: Any) -> list[Attention]:
    own = attention(c, position=rotary(c, partial=True), qk_norm=PerHead(_norm(c)), gate=OutputGate())
    return [own if each else NO_ATTENTION for each in attends(c)]


def delta_rule(c: Any, **parts: Any) -> DeltaRule:
    """The gated delta rule of a config; `parts` are fields that differ."""
    usual: dict[str, Any] = {"eps": c.rms_norm_eps}
    return DeltaRule(
        key_heads=c.linear_num_key_heads,
        value_heads=c.linear_num_value_heads,
        key_dim=c.linear_key_head_dim,
        value_dim=c.linear_value_head_dim,
        kernel=c.linear_conv_kernel_dim,
        alternate=getattr(c, "linear_value_heads_alternate", False),  # of GGUF files
        **(usual | parts),
    )


def _mixing(c: Any) -> list[StateLayer | None]:
    own = delta_rule(c)
    return [None if each else own for each in attends(c)]


def _experts(c: Any, *, normalize: bool = True) -> FeedForward:
    act = activation(c.hidden_act)
    expert = Gated(c.moe_intermediate_size, act)
    chosen = routed(expert, count=c.num_experts, active=c.num_experts_per_tok, normalize=normalize)
    return Shared(chosen, Opened(Gated(c.shared_expert_intermediate_size, act)))


def _next_networks(c: Any) -> list[FeedForward]:
    """Experts in every decoder_sparse_step-th layer, unless mlp_only_layers lists it."""
    chosen = [
        layer not in c.mlp_only_layers and c.num_experts > 0 and (layer + 1) % c.decoder_sparse_step == 0
        for layer in range(c.num_hidden_layers)
    ]
    act = activation(c.hidden_act)
    mixed = _experts(c, normalize=c.norm_topk_prob) if any(chosen) else gated_network(c)
    return [mixed if own else Gated(c.intermediate_size, act) for own in chosen]


def _attention_weights(target: str, layer: str, part: Attention) -> list[Entry]:
    """A head's queries are followed by its gates."""
    source, keys = f"{layer}.self_attn", part.kv_heads * part.head_dim
    queries, gates = (HeadRows(part.heads, 2 * part.head_dim, begin) for begin in (0, part.head_dim))
    joined = Joined((part.heads * part.head_dim, keys, keys), (queries, Same(), Same()))
    names = tuple(f"{source}.{name}_proj.weight" for name in "qkv")
    return [
        Entry(f"{target}.qkv.weight", names, joined),
        Entry(f"{target}.gate.weight", names[:1], gates),
        *linear(f"{target}.out", f"{source}.o_proj", False),
    ]


def _delta_weights(target: str, layer: str, part: StateLayer) -> list[Entry]:
    assert isinstance(part, DeltaRule)
    source, heads = f"{layer}.linear_attn", part.value_heads
    rates = tuple(f"{source}.in_proj_{name}.weight" for name in "ba")
    return [
        *linear(f"{target}.enter", f"{source}.in_proj_qkv", False),
        *linear(f"{target}.opening", f"{source}.in_proj_z", False),
        Entry(f"{target}.rates.weight", rates, Joined((heads, heads))),
        *rest_of_delta(target, source, part),
    ]


def _next_delta_weights(target: str, layer: str, part: StateLayer) -> list[Entry]:
    """Qwen3-Next's: what belongs to a key head lies together, its values and gates behind its query and key."""
    assert isinstance(part, DeltaRule)
    source, heads, each = f"{layer}.linear_attn", part.key_heads, part.value_heads // part.key_heads
    keys, values = part.key_dim, each * part.value_dim
    rows = 2 * keys + 2 * values
    places = tuple(HeadRows(heads, rows, begin) for begin in (0, keys, 2 * keys, 2 * keys + values))
    made, rates = (f"{source}.in_proj_qkvz.weight",), (f"{source}.in_proj_ba.weight",)
    halves = tuple(HeadRows(heads, 2 * each, begin) for begin in (0, each))
    return [
        Entry(f"{target}.enter.weight", made * 3, Joined((heads * keys, heads * keys, heads * values), places[:3])),
        Entry(f"{target}.opening.weight", made, places[3]),
        # As in GGUF files.
        *linear(f"{target}.enter", f"{source}.in_proj_qkv", False),
        *linear(f"{target}.opening", f"{source}.in_proj_z", False),
        Entry(f"{target}.rates.weight", rates * 2, Joined((part.value_heads,) * 2, halves)),
        *rest_of_delta(target, source, part),
    ]


def rest_of_delta(target: str, source: str, part: DeltaRule, norm: str = "norm", out: str = "out_proj") -> list[Entry]:
    """The weights beside the projections of a token."""
    return [
        Entry(
            f"{target}.convolution.weight",
            (f"{source}.conv1d.weight",),
            Reshaped(((part.convolved, 1, part.kernel),)),
        ),
        Entry(f"{target}.decay", (f"{source}.A_log",)),
        Entry(f"{target}.offset", (f"{source}.dt_bias",)),
        Entry(f"{target}.norm", (f"{source}.{norm}.weight",)),
        *linear(f"{target}.out", f"{source}.{out}", False),
    ]


_NAMES = DecoderNames(
    attention=_attention_weights,
    mixing=_delta_weights,
    experts=ExpertNames(always="mlp.shared_expert"),
    # What guesses later tokens is unread in transformers, too.
    unread=(*DecoderNames().unread, r"mtp\..*"),
)

FAMILIES = (
    decoder(
        "Qwen3.5",
        ("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
        "gated delta rule with a state in most layers, gated attention, QK norms per head",
        attention=_attention,
        mixing=_mixing,
        ffn=gated_network,
        norm=_norm,
        refuse=_refuse_others,
        names=_NAMES,
    ),
    decoder(
        "Qwen3.5-MoE",
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
        "gated delta rule with a state in most layers, gated attention, MoE with a shared expert",
        attention=_attention,
        mixing=_mixing,
        ffn=_experts,
        norm=_norm,
        refuse=_refuse_others,
        names=_NAMES,
    ),
    decoder(
        "Qwen3-Next",
        pairs("Qwen3Next"),
        "gated delta rule with a state in most layers, gated attention, MoE with a shared expert",
        attention=_attention,
        mixing=_mixing,
        ffn=_next_networks,
        norm=_norm,
        refuse=_refuse_others,
        names=replace(_NAMES, mixing=_next_delta_weights),
    ),
)
