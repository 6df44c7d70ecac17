"""GLM-4.5 and dots.llm1: many small experts beside one for every token, chosen by corrected scores; the first layers
have none (arXiv:2508.06471, arXiv:2506.05767)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import (
    activation,
    corrected,
    decoder_table,
    gated,
    layer_windows,
    projected_attention,
    projected_experts,
    rotary,
    routed,
)
from engine.model.normalisation import Norm
from engine.model.spec import Attention, Block, FeedForward, Gated, Lm, ModelSpec, PerHead, Pre, Shared, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    dots = config.model_type == "dots1"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    norm = Norm("rms", config.rms_norm_eps)
    windows = layer_windows(config) if dots else [None] * config.num_hidden_layers
    first = config.first_k_dense_replace or 0
    blocks = [
        Block(
            placement=Pre(norm, norm),
            attention=Attention(
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads or config.num_attention_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                position=rotary(config, head_dim, partial=not dots),
                window=window,
                qk_norm=PerHead(norm) if dots or config.use_qk_norm else None,
                qkv_bias=config.attention_bias,
                out_bias=dots and config.attention_bias,
            ),
            ffn=_feed_forward(config, routes=layer >= first),
        )
        for layer, window in enumerate(windows)
    ]
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size),
        blocks=tuple(blocks),
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def _feed_forward(config: Any, *, routes: bool) -> FeedForward:
    act = activation(config.hidden_act)
    if not routes:
        return Gated(config.intermediate_size, act)
    count, shared = config.n_routed_experts, config.n_shared_experts
    if not count or not shared:
        raise UnsupportedModelError(
            "n_routed_experts and n_shared_experts of the config must be at least 1 where layers have experts (see "
            f"first_k_dense_replace); got {count} and {shared}."
        )
    experts = routed(
        Gated(config.moe_intermediate_size, act),
        count=count,
        active=config.num_experts_per_tok or 0,
        normalize=config.norm_topk_prob,
        routing=corrected(config, count),
    )
    return Shared(experts, Gated(config.moe_intermediate_size * shared, act))


def _layer(target: str, source: str, block: Block) -> list[Entry]:
    inner, stored = f"{target}.ffn.inner", f"{source}.mlp"
    entries = projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention)
    match block.ffn:
        case Shared(part, Gated() as always):
            entries += projected_experts(f"{inner}.routed", stored, part, "gate.e_score_correction_bias")
            entries += gated(f"{inner}.always", f"{stored}.shared_experts", always)
        case Gated():
            entries += gated(inner, stored, block.ffn)
    return entries


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    table = decoder_table(model, _layer)
    # One layer more guesses the token after the next, which transformers leaves unread, too.
    return replace(table, ignored=(*table.ignored, rf"model\.layers\.{len(model.decoder.blocks)}\..*"))


FAMILY = Family(
    name="GLM-4.5 and dots.llm1",
    architectures=("Glm4MoeForCausalLM", "Glm4MoeModel", "Dots1ForCausalLM", "Dots1Model"),
    headless=("Glm4MoeModel", "Dots1Model"),
    brings="MoE routed by corrected sigmoid scores, in groups, with a shared expert",
    spec=spec,
    weights=weights,
)
