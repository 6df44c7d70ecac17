"""gpt-oss: sinks in attention, windows in every second layer, experts with biases and clamped gates, whose weights may
be stored as MXFP4 (arXiv:2508.10925)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    decoder_table,
    layer_windows,
    linear,
    plain_decoder,
    projected_attention,
    rotary,
    routed,
)
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Clamped, ModelSpec, Sinks
from engine.model.table import Alternating, Entry, Family, Same, Transform, Turned, WeightTable


def spec(config: Any) -> ModelSpec:
    if config.hidden_act != "silu":
        raise UnsupportedModelError(f"hidden_act of the config must be 'silu' for gpt-oss, got {config.hidden_act!r}.")
    attentions = [
        Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            position=rotary(config, config.head_dim),
            window=window,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            sinks=Sinks(),
        )
        for window in layer_windows(config)
    ]
    ffn = routed(
        Clamped(config.intermediate_size, config.swiglu_limit, config.swiglu_alpha, bias=True),
        count=config.num_local_experts,
        active=config.num_experts_per_tok,
        router_bias=True,
    )
    return plain_decoder(config, attentions, ffn, norm=Norm("rms", config.rms_norm_eps, in_float32=True))


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    inner, stored = f"{target}.ffn.inner", f"{source}.mlp.experts"
    attention = f"{target}.attention.inner"
    # Gates and what they open lie in turns; blocks of MXFP4 hold rows of outputs, plain matrices rows of inputs.
    forms: list[tuple[str, str, Transform, int]] = [
        ("up", "gate_up_proj", Alternating(), 1),
        ("down", "down_proj", Same(), 2),
    ]
    entries = [
        *projected_attention(attention, f"{source}.self_attn", block.attention),
        Entry(f"{attention}.sinks", (f"{source}.self_attn.sinks",)),
        *linear(f"{inner}.router", f"{source}.mlp.router", True, None),
    ]
    for ours, theirs, how, axis in forms:
        entries += [
            Entry(f"{inner}.{ours}.weight", (f"{stored}.{theirs}",), Turned(how), shard_axis=axis),
            Entry(f"{inner}.{ours}.weight", (f"{stored}.{theirs}_blocks",), how, shard_axis=axis),
            Entry(f"{inner}.{ours}.bias", (f"{stored}.{theirs}_bias",), how),
        ]
    return entries


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="gpt-oss",
    architectures=("GptOssForCausalLM", "GptOssModel"),
    headless=("GptOssModel",),
    brings="attention sinks, MoE with biases and clamped gates, windows in some layers, MXFP4",
    spec=spec,
    weights=weights,
    reads_mxfp4=True,
)
