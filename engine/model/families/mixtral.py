"""Mixtral: LLaMA's blocks with experts as feed-forward networks, and perhaps a window (arXiv:2401.04088)."""

from __future__ import annotations

from typing import Any

from engine.model.families.common import (
    activation,
    experts,
    fused_experts,
    head,
    projected_attention,
    rotary,
    routed,
    sliding_window,
)
from engine.model.spec import Attention, Block, Experts, Gated, Lm, ModelSpec, Norm, Pre, Stack, Tokens
from engine.model.table import Entry, Family, WeightTable


def spec(config: Any) -> ModelSpec:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    norm = Norm("rms", config.rms_norm_eps)
    block = Block(
        placement=Pre(attention=norm, ffn=norm),
        attention=Attention(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            position=rotary(config, head_dim),
            window=sliding_window(config.sliding_window),
        ),
        ffn=routed(
            Gated(config.intermediate_size, activation(config.hidden_act)),
            count=config.num_local_experts,
            active=config.num_experts_per_tok,
        ),
    )
    decoder = Stack(
        hidden_size=config.hidden_size,
        embedding=Tokens(vocab_size=config.vocab_size, width=config.hidden_size),
        blocks=(block,) * config.num_hidden_layers,
        final_norm=norm,
    )
    return ModelSpec(encoder=None, decoder=decoder, head=Lm(tied=config.tie_word_embeddings))


def weights(model: ModelSpec) -> WeightTable:
    assert model.decoder is not None
    entries = [
        Entry("decoder.embedding.tokens", ("model.embed_tokens.weight",), shard_axis=0),
        Entry("decoder.final_norm.weight", ("model.norm.weight",)),
        *head(model, "lm_head"),
    ]
    for i, block in enumerate(model.decoder.blocks):
        target, source = f"decoder.blocks.{i}", f"model.layers.{i}"
        stored = f"{source}.block_sparse_moe"
        assert isinstance(block.ffn, Experts)
        entries += [
            Entry(f"{target}.attention.before.weight", (f"{source}.input_layernorm.weight",)),
            Entry(f"{target}.ffn.before.weight", (f"{source}.post_attention_layernorm.weight",)),
            *projected_attention(f"{target}.attention.inner", f"{source}.self_attn", block.attention),
            *experts(f"{target}.ffn.inner", f"{stored}.experts", block.ffn, ("w1", "w3", "w2"), f"{stored}.gate"),
            *fused_experts(f"{target}.ffn.inner", f"{source}.mlp.experts", f"{source}.mlp.gate"),
        ]
    return WeightTable(
        tuple(entries),
        prefix="model.",
        ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        head="lm_head.weight",
    )


FAMILY = Family(
    name="Mixtral",
    architectures=("MixtralForCausalLM", "MixtralModel"),
    headless=("MixtralModel",),
    brings="experts, each token to the likeliest of them",
    spec=spec,
    weights=weights,
)
