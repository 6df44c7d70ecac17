"""Qwen2-MoE and Qwen3-MoE: many small experts in some layers or in all. Qwen2's have a network beside them that every
token goes to, more or less (arXiv:2407.10671); Qwen3's have none, and norms of each head's queries and keys
(arXiv:2505.09388)."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    decoder_table,
    gated,
    layer_windows,
    linear,
    projected_attention,
    projected_experts,
    rotary,
    routed,
    sliding_window,
)
from engine.model.normalisation import Norm
from engine.model.spec import (
    Attention,
    Block,
    Experts,
    FeedForward,
    Gated,
    Lm,
    ModelSpec,
    Opened,
    PerHead,
    Pre,
    Shared,
    Stack,
    Tokens,
)
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    # Not an attribute of the config unless the checkpoint sets it.
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norm = Norm("rms", config.rms_norm_eps)
    older = config.model_type == "qwen2_moe"
    # Qwen3's config itself sets it to None where use_sliding_window is false; its layers are all alike.
    windows = layer_windows(config) if older else [sliding_window(config.sliding_window)] * config.num_hidden_layers
    attentions = [
        Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim),
            window=window,
            qk_norm=None if older else PerHead(norm),
            qkv_bias=config.qkv_bias if older else config.attention_bias,
            out_bias=False if older else config.attention_bias,
        )
        for window in windows
    ]
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size),
        blocks=tuple(
            Block(placement=Pre(attention=norm, ffn=norm), attention=attention, ffn=_feed_forward(config, layer))
            for layer, attention in enumerate(attentions)
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
    ffn = routed(
        Gated(config.moe_intermediate_size, act),
        count=config.num_experts,
        active=config.num_experts_per_tok,
        normalize=config.norm_topk_prob,
    )
    if config.model_type != "qwen2_moe":
        return ffn
    return Shared(ffn, Opened(Gated(config.shared_expert_intermediate_size, act)))


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    inner, stored = f"{target}.ffn.inner", f"{source}.mlp"
    entries = projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention)
    match block.ffn:
        case Shared(part, Opened(always)):
            entries += linear(f"{inner}.always.opening", f"{stored}.shared_expert_gate", False, None)
            entries += gated(f"{inner}.always.inner", f"{stored}.shared_expert", always)
            entries += projected_experts(f"{inner}.routed", stored, part)
        case Experts():
            entries += projected_experts(inner, stored, block.ffn)
        case Gated():
            entries += gated(inner, stored, block.ffn)
    return entries


def weights(model: ModelSpec) -> WeightTable:
    return decoder_table(model, _layer)


FAMILY = Family(
    name="Qwen2-MoE and Qwen3-MoE",
    architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel", "Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    headless=("Qwen2MoeModel", "Qwen3MoeModel"),
    brings="MoE with many small experts and an optional shared expert, dense layers in between, QK norms per head",
    spec=spec,
    weights=weights,
)
