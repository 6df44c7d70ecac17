"""OLMoE: LLaMA's blocks with many small experts, and norms of all queries and all keys at once (arXiv:2409.02060)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    decoder_table,
    plain_decoder,
    projected_attention,
    projected_experts,
    rotary,
    routed,
)
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Experts, Gated, ModelSpec, WholeProjection
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    if config.clip_qkv is not None:
        raise UnsupportedModelError(
            "clip_qkv of the config must be null for OLMoE, which would clip after the norms of queries and keys; got "
            f"{config.clip_qkv}."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim),
        qk_norm=WholeProjection(Norm("rms", config.rms_norm_eps)),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    ffn = routed(
        Gated(config.intermediate_size, activation(config.hidden_act)),
        count=config.num_experts,
        active=config.num_experts_per_tok,
        normalize=config.norm_topk_prob,
    )
    return plain_decoder(config, [attention] * config.num_hidden_layers, ffn)


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    assert isinstance(block.ffn, Experts)
    return [
        *projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention),
        *projected_experts(f"{target}.ffn.inner", f"{source}.mlp", block.ffn),
    ]


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="OLMoE",
    architectures=("OlmoeForCausalLM", "OlmoeModel"),
    headless=("OlmoeModel",),
    brings="MoE with many small experts, QK norms over the whole projection",
    spec=spec,
    weights=weights,
)
