"""JetMoE (arXiv:2404.07413): the heads of attention are experts, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.model.families.common import activation, attention, rms, rotary, routed
from engine.model.families.decoder import decoder, pairs
from engine.model.families.names import DecoderNames
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Experts, FeedForward, Gated, RoutedHeads
from engine.model.table import Entry


def _attention(c: Any) -> Attention:
    """Each expert has as many heads as there are KV heads."""
    active = c.num_experts_per_tok
    heads = RoutedHeads(c.num_local_experts, active)
    return attention(c, heads=active * c.num_key_value_heads, position=rotary(c), routed=heads)


def _experts(c: Any) -> Experts:
    expert = Gated(c.intermediate_size, activation(c.activation_function))
    return replace(routed(expert, count=c.num_local_experts, active=c.num_experts_per_tok), sum_bias=True)


def _stored(target: str, source: str, **names: str) -> list[Entry]:
    """A router and the bias of a sum, and further parameters, stored like ours."""
    both = {"router.weight": "router.layer.weight", "bias": "bias"}
    return [Entry(f"{target}.{ours}", (f"{source}.{theirs}",)) for ours, theirs in (both | names).items()]


def _attention_weights(target: str, source: str, _: Attention) -> list[Entry]:
    names = {"queries.weight": "input_linear.weight", "results.weight": "output_linear.weight"}
    kv = Entry(f"{target}.kv.weight", (f"{source}.self_attention.kv_proj.weight",))
    return [kv, *_stored(target, f"{source}.self_attention.experts", **names)]


def _network_weights(target: str, source: str, _: FeedForward) -> list[Entry]:
    names = {"up.weight": "input_linear.weight", "down.weight": "output_linear.weight"}
    return _stored(target, f"{source}.mlp", **names)


FAMILY = decoder(
    "JetMoE",
    pairs("JetMoe"),
    "MoE with a bias, and heads of attention that are experts, too: each token chooses its queries",
    attention=_attention,
    ffn=_experts,
    # The layers' eps is no setting.
    norm=lambda _: Norm("rms", 1e-6),
    final_norm=rms,
    names=DecoderNames(attention=_attention_weights, ffn=_network_weights),
)
