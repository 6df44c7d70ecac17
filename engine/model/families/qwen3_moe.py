"""Qwen3-MoE: norms of each head's queries and keys, experts in some layers or in all (arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    decoder_table,
    experts,
    fused_experts,
    gated,
    projected_attention,
    rotary,
    routed,
    sliding_window,
)
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, Experts, FeedForward, Gated, Lm, ModelSpec, PerHead, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    # Not an attribute of the config unless the checkpoint sets it.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norm = Norm("rms", config.rms_norm_eps)
    attention = Attention(
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        position=rotary(config, head_dim),
        # The config itself sets it to None where use_sliding_window is false.
        window=sliding_window(config.sliding_window),
        qk_norm=PerHead(norm),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
    )
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size),
        blocks=tuple(
            Block(placement=Pre(attention=norm, ffn=norm), attention=attention, ffn=_feed_forward(config, layer))
            for layer in range(config.num_hidden_layers)
        ),
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def _feed_forward(config: Any, layer: int) -> FeedForward:
    """Experts in every decoder_sparse_step-th layer, unless mlp_only_layers lists it."""
    every = config.decoder_sparse_step
    if every < 1:
        raise UnsupportedModelError(f"decoder_sparse_step of the config must be at least 1, got {every}.")
    act = activation(config.hidden_act)
    if layer in config.mlp_only_layers or config.num_experts <= 0 or (layer + 1) % every:
        return Gated(config.intermediate_size, act)
    return routed(
        Gated(config.moe_intermediate_size, act),
        count=config.num_experts,
        active=config.num_experts_per_tok,
        normalize=config.norm_topk_prob,
    )


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    inner, stored = f"{target}.ffn.inner", f"{source}.mlp"
    entries = projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention)
    match block.ffn:
        case Experts():
            names = ("gate_proj", "up_proj", "down_proj")
            entries += experts(inner, f"{stored}.experts", block.ffn, names, f"{stored}.gate")
            entries += fused_experts(inner, f"{stored}.experts", f"{stored}.gate")
        case Gated():
            entries += gated(inner, stored, block.ffn)
    return entries


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="Qwen3-MoE",
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    headless=("Qwen3MoeModel",),
    brings="many small experts, layers without experts between them, per-head norms",
    spec=spec,
    weights=weights,
)
