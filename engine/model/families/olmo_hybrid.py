"""OLMo-Hybrid: OLMo 3's attention without windows among layers of the gated delta rule."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import attention, gated_network, linear, rms_in_float32, rotary
from engine.model.families.decoder import decoder, pairs
from engine.model.families.names import DecoderNames
from engine.model.families.qwen3_5 import attends, delta_rule, refuse_sizes, rest_of_delta
from engine.model.normalisation import Norm
from engine.model.spec import (
    NO_ATTENTION,
    AfterSublayer,
    Attention,
    DeltaRule,
    Placement,
    Pre,
    StateLayer,
    WholeProjection,
)
from engine.model.table import Entry, Joined, Reshaped


def _refuse_others(c: Any) -> None:
    if c.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act of the config must be 'silu' for this family, got {c.hidden_act!r}.")
    refuse_sizes(c)


def _attention(c: Any) -> list[Attention]:
    """Published models have no positions."""
    turns = bool((getattr(c, "rope_parameters", None) or {}).get("rope_theta"))
    position = rotary(c, in_float32=True) if turns else None
    own = attention(c, position=position, qk_norm=WholeProjection(rms_in_float32(c)), bias=c.attention_bias)
    return [own if each else NO_ATTENTION for each in attends(c)]


def _mixing(c: Any) -> list[StateLayer | None]:
    own = delta_rule(c, eps=1e-5, most=2.0 if c.linear_allow_neg_eigval else 1.0)
    return [None if each else own for each in attends(c)]


def _placement(c: Any, norm: Norm) -> list[Placement]:
    return [AfterSublayer(norm, norm) if each else Pre(norm, norm) for each in attends(c)]


def _norms(placement: Placement) -> tuple[str, ...]:
    if isinstance(placement, Pre):
        return ("input_layernorm", "post_attention_layernorm")
    return ("post_attention_layernorm", "post_feedforward_layernorm")


def _delta_weights(target: str, layer: str, part: StateLayer) -> list[Entry]:
    assert isinstance(part, DeltaRule)
    source, keys, heads = f"{layer}.linear_attn", part.key_heads * part.key_dim, part.value_heads
    entered = tuple(f"{source}.{name}_proj.weight" for name in "qkv")
    rates = tuple(f"{source}.{name}_proj.weight" for name in "ba")
    kernels = tuple((width, 1, part.kernel) for width in (keys, keys, heads * part.value_dim))
    apart = tuple(f"{source}.{name}_conv1d.weight" for name in "qkv")
    return [
        Entry(f"{target}.convolution.weight", apart, Reshaped(kernels)),
        Entry(f"{target}.enter.weight", entered, Joined((keys, keys, heads * part.value_dim))),
        *linear(f"{target}.opening", f"{source}.g_proj", False),
        Entry(f"{target}.rates.weight", rates, Joined((heads, heads))),
        *rest_of_delta(target, source, part, norm="o_norm", out="o_proj"),
    ]


FAMILY = decoder(
    "OLMo-Hybrid",
    pairs("OlmoHybrid"),
    "gated delta rule with a state in most layers, attention with norms after the sublayers, QK norms",
    attention=_attention,
    mixing=_mixing,
    ffn=gated_network,
    norm=rms_in_float32,
    placement=_placement,
    refuse=_refuse_others,
    names=DecoderNames(
        mixing=_delta_weights,
        norms=_norms,
        # Names that files have, and transformers' own.
        renamed=(
            (r"\.attention_layer_norm\.", ".input_layernorm."),
            (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
        ),
    ),
)
